"""Kernels: attention, rotary embedding, norms, losses. They know no model and no mesh."""
