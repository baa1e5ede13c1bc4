"""Extrapolation of a full step from traces of a small model."""
