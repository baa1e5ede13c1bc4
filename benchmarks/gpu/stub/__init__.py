"""A CUDA device that computes nothing, for builds of torch for CUDA on machines without a GPU."""
