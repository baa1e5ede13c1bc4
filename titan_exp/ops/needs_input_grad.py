"""Input gradients that autograd needs now. Zero-bubble schedules ask for dX and dW separately."""

from typing import Any

import torch


def needs_input_grad(context: Any) -> tuple[bool, bool]:
    """True for each of an operator's first two inputs whose gradient this backward pass needs; call it inside backward.

    `ctx.needs_input_grad` covers all backward passes. A compiled graph computes both.
    """
    needed_ever = context.needs_input_grad[:2]
    if torch.compiler.is_compiling():
        return needed_ever
    first, second = (
        needed and _will_run(node[0]) for node, needed in zip(context.next_functions, needed_ever, strict=False)
    )
    return first, second


def _will_run(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch cannot tell for a leaf among the requested inputs
        return True
