"""CUDA models without a GPU: caching allocator, fake kernels, device data sheets."""
