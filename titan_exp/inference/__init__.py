"""Inference: text generation, and evaluation of checkpoints."""
