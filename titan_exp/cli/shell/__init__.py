"""Integration with the shell."""
