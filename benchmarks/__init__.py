"""Measurements, each a script of its own; results are recorded in benchmarks/log."""
