"""Command lines: Hydra, and completion in the shell."""
