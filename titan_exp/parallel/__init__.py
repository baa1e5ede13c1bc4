"""Device mesh and parallelisms, the same for every model."""
