"""Tensors that an operator keeps for backward beside autograd's saved tensors.

Activation checkpointing recomputes a block until its last saved tensor. An operator at the end of a block that keeps
its tensors here needs no recomputation.
"""

from typing import Any

import torch
from torch import Tensor


def keep_unsaved(context: Any, *tensors: Tensor | None) -> None:
    """Keep tensors for backward. They must not be recomputable activations: their memory is held until backward."""
    context.unsaved = tensors


def unsaved_tensors(context: Any) -> tuple[Any, ...]:
    """Kept tensors, empty without; call it inside backward. Released when autograd releases saved tensors: now, unless
    backward is split.
    """
    tensors = getattr(context, "unsaved", ())
    if not torch._C._autograd._get_current_graph_task_keep_graph():  # type: ignore[attr-defined]
        context.unsaved = ()
    return tensors
