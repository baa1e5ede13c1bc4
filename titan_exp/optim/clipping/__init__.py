"""Gradient clipping other than by the global norm alone."""
