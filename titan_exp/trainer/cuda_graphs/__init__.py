"""CUDA graphs of a training step."""
