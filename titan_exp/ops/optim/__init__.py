"""Optimizer kernels."""
