"""Model specs: descriptions of a model that parallelism, planner and converters read."""
