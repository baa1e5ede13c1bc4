"""Input gradients that autograd needs now. Zero-bubble schedules ask for dX and dW separately."""

from typing import Any

import torch


def needs_input_grad(context: Any) -> tuple[bool, bool]:
    """True for each of an operator's first two inputs whose gradient is used now; call it inside backward.

    `needs_input_grad` says only whether they ever are. A compiled graph computes both.
    """
    ever = context.needs_input_grad[:2]
    if torch.compiler.is_compiling():
        return ever
    first, second = (needed and _is_run(node[0]) for node, needed in zip(context.next_functions, ever, strict=False))
    return first, second


def _is_run(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch cannot tell of a leaf that it is asked the gradient of
        return True
