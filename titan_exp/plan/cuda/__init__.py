"""CUDA without a GPU: models of the caching allocator, fake kernels, device data sheets."""
