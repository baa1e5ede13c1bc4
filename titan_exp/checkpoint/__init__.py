"""Distributed checkpoints of the full training state, keyed by full parameter names."""
