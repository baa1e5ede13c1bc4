"""The device mesh, and what cuts a model over it, the same for every model."""
