"""Quantized grouped matmul for experts."""
