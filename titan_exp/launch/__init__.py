"""Launching: run id, run folder, executors, run state."""
