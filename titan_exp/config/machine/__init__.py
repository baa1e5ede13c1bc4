"""Machine and kernel detection without importing torch."""
