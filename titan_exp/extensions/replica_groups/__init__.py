"""Replica groups and semi-synchronous training."""
