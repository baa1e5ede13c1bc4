"""Rounds of a sweep: one for a grid, rungs of successive halving, batches of Optuna."""
