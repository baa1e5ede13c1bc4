"""Command lines: Hydra, and shell completion."""
