"""Measurements of speed, memory and numerics: `python -m benchmarks --help` lists them."""
