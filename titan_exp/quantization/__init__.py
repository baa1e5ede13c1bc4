"""Matmuls in fewer bits: recipes on torchao's casts and matmuls, for weights sharded in any way."""
