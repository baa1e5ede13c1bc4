"""Single-device models in plain PyTorch, built from shared blocks. Knows no parallelism."""
