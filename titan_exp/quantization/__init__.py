"""Low-precision matmuls: recipes built on torchao's casts and matmuls, for weights sharded in any way."""
