"""Verdicts of studies by pairs of runs: registration, evidence, standing."""
