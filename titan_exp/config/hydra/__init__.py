"""Hydra composition: config groups, presets, resolvers."""
