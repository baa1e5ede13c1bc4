"""Sweeps: Hydra sweeper, sweep plan, shipped studies."""
