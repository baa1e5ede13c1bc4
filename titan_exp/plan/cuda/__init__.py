"""CUDA on a machine without a GPU: caching allocator, fake kernels, device data sheets."""
