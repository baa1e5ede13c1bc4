"""Float8 casts and kernels."""
