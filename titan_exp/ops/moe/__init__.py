"""Mixture-of-experts kernels: grouped matmul, token padding."""
