"""Metric sinks: console, JSON lines, TensorBoard, W&B."""
