"""Run folder: files, state, attempts, metrics."""
