"""Command-line arguments, help and completion."""
