"""Attention kernels, RoPE, KV cache."""
