"""Pretraining experiments: compose, check, launch, train in 5D, compare."""

__version__ = "1.0.0"
