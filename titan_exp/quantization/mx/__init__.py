"""Microscaling recipes: MXFP8 and NVFP4."""
