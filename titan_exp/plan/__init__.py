"""Predicting memory and speed: the trainer's own build and step on tensors without data, in a world without ranks."""
