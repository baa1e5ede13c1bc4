"""Detect recomputation by activation checkpointing, whose forward passes must not count twice."""

import torch


def is_recomputing() -> bool:
    """True inside a backward pass, where a module's forward only runs to recompute activations."""
    return torch._C._current_graph_task_id() != -1
