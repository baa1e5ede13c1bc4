"""Run folder: its files, state, attempts, metrics."""
