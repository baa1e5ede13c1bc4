"""Rank process: environment, entry point, status."""
