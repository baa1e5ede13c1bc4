"""Config groups: one frozen dataclass per group."""
