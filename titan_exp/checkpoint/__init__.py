"""Distributed checkpoints of the whole training state, keyed by full parameter names."""
