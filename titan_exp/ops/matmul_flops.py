"""FLOPs of matmuls by operator: torch's own formulas, and our formulas for grouped matmuls."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch.utils import flop_counter
from torch.utils.flop_counter import flop_registry

GROUPED = ("titan_exp.grouped_rows", "titan_exp.grouped_outer", "aten._grouped_mm", "aten._scaled_grouped_mm")
"""Grouped matmuls over experts. Every row counts, padding included."""


def matmul_flops(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int | None:
    """FLOPs of a call, 2 per multiply-add; None if no formula is known."""
    if not isinstance(operator, torch._ops.OpOverload):
        return None
    packet = operator._overloadpacket
    if str(packet) in GROUPED and args[0].dim() == 2:
        # Each row is multiplied by one expert's matrix, independent of the number of experts.
        return 2 * args[0].numel() * args[1].shape[-1]
    if packet in (torch.ops.aten.matmul, torch.ops.aten.linear):
        # Below autograd, as in the body of a custom operator, torch does not decompose them.
        return 2 * out.numel() * args[0].shape[-1]
    namespace, _, name = str(packet).partition(".")
    # The in-place variant has the same FLOPs.
    packet = getattr(torch.ops.aten, name.rstrip("_"), packet) if namespace == "aten" and name.endswith("_") else packet
    if packet == torch.ops.aten.addmm:
        args = args[:3]  # torch's formula takes no `out_dtype`
    return flop_registry[packet](*args, **kwargs, out_val=out) if packet in flop_registry else None


def count_grouped_heads() -> None:
    """Let torch's attention formulas take fewer key heads than query heads, which torch 2.11's refuse. The compiler
    uses them to choose what to recompute within a budget."""
    for name in ("sdpa_flop_count", "sdpa_backward_flop_count"):
        formula = getattr(flop_counter, name)
        if not hasattr(formula, "__wrapped__"):
            setattr(flop_counter, name, _of_grouped_heads(formula))


def _of_grouped_heads(formula: Callable[..., int]) -> Callable[..., int]:
    @wraps(formula)
    def count(*shapes: Sequence[int]) -> int:
        *others, query, key, value = shapes
        return formula(*others, query, *((batch, query[1], *rest) for batch, _, *rest in (key, value)))

    return count
