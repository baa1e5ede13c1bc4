"""Optimizers, learning-rate schedules, and the one global clip."""
