"""Facts about the machine and its kernels, found without importing torch."""
