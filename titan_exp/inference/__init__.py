"""Inference: generate text and evaluate a checkpoint."""
