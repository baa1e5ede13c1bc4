"""Which gradients a backward pass is after: where it is split in two, a projection's are computed one at a time."""

from typing import Any

import torch


def needs_input_grad(context: Any) -> tuple[bool, bool]:
    """Of the first two inputs of an operator, whether their gradients are used now; asked inside its backward pass.

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
