"""Memory and speed prediction: the trainer's own build and step on fake tensors and a fake process group."""
