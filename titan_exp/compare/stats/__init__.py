"""Statistics of a comparison."""
