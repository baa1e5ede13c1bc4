"""Planner: memory and speed of a run, predicted from the trainer's own build and step on fake tensors.

`trace/` traces a rank's step on a fake process group. `extrapolate/` composes the step of a large model from samples of
a small one, and of its pipeline from a simulation. `caching_allocator` replays the allocations, `roofline` estimates
the time, and `predict` makes a plan of all these. `gate` checks the memory of a run before its launch and looks for
changes that make it fit, `layout_search` looks for faster layouts, and `tables` and `draw` show plans.
"""
