"""Matmuls in fewer bits: recipes on torchao's casts and matmuls, for weights divided and sharded in any way."""
