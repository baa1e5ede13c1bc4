"""Trace of the trainer's step on fake tensors."""
