"""Matrices of sharded weights: gathered to an owner, split into projections, orthogonalized."""
