"""Tracking: run folder and metric sinks."""
