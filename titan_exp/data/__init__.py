"""Data loading: document sources, tokenizers, layout-invariant row order, sequence packing, and two loaders."""
