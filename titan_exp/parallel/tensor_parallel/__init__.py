"""Tensor parallelism: sharded layers and their collectives."""
