"""Extrapolation of a step from traces of a small model."""
