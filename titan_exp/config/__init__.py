"""Configuration: frozen dataclasses per group, Hydra composition, layout, error messages. Imports no torch."""
