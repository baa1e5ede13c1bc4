"""The configuration: one frozen dataclass per group, resolvers, and the rules between fields. Imports no torch."""
