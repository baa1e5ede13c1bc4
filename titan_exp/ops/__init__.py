"""Kernels: attention, rotary embedding, norms, losses. Knows no model and no mesh."""
