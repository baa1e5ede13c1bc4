"""Pretraining experiments: compose, check, launch, train in 4D, compare."""
