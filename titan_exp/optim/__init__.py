"""Optimizers, learning-rate schedules, and global gradient clipping."""
