"""Comparison with torchtitan on one GPU: cases, both sides, results and the planner's table."""
