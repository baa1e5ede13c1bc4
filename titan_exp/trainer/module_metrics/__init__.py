"""Metrics of modules by name of their file, switched on by `tracking.metrics`."""
