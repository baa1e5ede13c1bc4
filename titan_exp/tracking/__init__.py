"""Tracking: the run folder and metric sinks."""
