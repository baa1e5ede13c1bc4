"""Trace of the trainer's step, run on fake tensors."""
