"""Sweeps: Hydra sweeper, sweep plan, study files."""
