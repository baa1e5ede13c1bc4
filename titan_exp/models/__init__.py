"""Single-device models in plain PyTorch, built from shared blocks that know no parallelism."""
