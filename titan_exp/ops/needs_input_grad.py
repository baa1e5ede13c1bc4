"""Input gradients that autograd needs now. Zero-bubble schedules ask for dX and dW separately."""

from typing import Any

import torch


def needs_input_grad(context: Any, count: int = 2) -> tuple[bool, ...]:
    """True for each of an operator's first `count` inputs whose gradient this backward pass needs; call it in backward.

    `ctx.needs_input_grad` covers all backward passes. A compiled graph computes both.
    """
    needed_ever = context.needs_input_grad[:count]
    if torch.compiler.is_compiling():
        return needed_ever
    return tuple(
        needed and _will_run(node[0]) for node, needed in zip(context.next_functions, needed_ever, strict=False)
    )


def _will_run(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch cannot tell for a leaf among the requested inputs
        return True
