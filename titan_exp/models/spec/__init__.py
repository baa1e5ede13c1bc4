"""Descriptions of a model that parallelism reads: tensor-parallel plan, pipeline plan."""
