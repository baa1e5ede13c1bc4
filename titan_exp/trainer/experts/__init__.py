"""Experts of a run: tokens per expert of the global batch, and their metrics."""
