"""What is known of operators: operations of a matmul, bytes of a message. One that is not known is refused."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from titan_exp.config.errors.user_error import UserError

KNOWN_NAMESPACES = ("aten", "c10d", "_c10d_functional", "fsdp", "prims", "titan_exp")
"""Operators of other libraries may hold memory that nobody sees."""
COMPUTING = ("mm", "bmm", "baddbmm", "addmm", "conv", "attention", "lstm", "gru", "linalg", "fft", "flex")
"""Parts of names of aten's operators whose work is not in proportion to their bytes, and has to be counted."""

SCALED_MATMULS = ("aten._scaled_mm", "aten._scaled_grouped_mm")
"""Those of float8 numbers."""
MATMULS = ("aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm", SCALED_MATMULS[0])
"""Operators that cuBLAS computes."""

GROUPED = ("titan_exp.grouped_rows", "titan_exp.grouped_outer", "aten._grouped_mm", "aten._scaled_grouped_mm")
"""Products of experts, whose rows are sorted. Every row is counted as some expert's: how many are is not known."""

_aten, _c10d, _functional = torch.ops.aten, torch.ops.c10d, torch.ops._c10d_functional

_GROUP_SECOND = ("allreduce_", "broadcast_", "send", "recv_", "barrier", "reduce_")
_NAMES = {
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "broadcast_": "broadcast",
    "alltoall_base_": "all-to-all",
    "all_to_all_single": "all-to-all",
    "send": "send",
    "recv_": "receive",
}
"""Messages by operator."""
_LARGER_SIDE = {"_allgather_base_": 0, "_reduce_scatter_base_": 1, "alltoall_base_": 1}
"""Which argument of an operator holds all of what its ranks exchange."""


def operations(operator: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Floating-point operations of a call, 2 for each multiplication and addition; 0 where bytes bound it.

    Raises:
        UserError: nobody knows how many.
    """
    packet = operator._overloadpacket
    if packet in _ATTENTION:
        return _attention(args, _ATTENTION[packet])
    if str(packet) in GROUPED and args[0].dim() == 2:
        # Each row by one expert's matrix, or by rows of another: how many experts there are plays no part.
        return 2 * args[0].numel() * args[1].shape[-1]
    namespace, _, name = str(packet).partition(".")
    # In place or not, the work is the same.
    packet = getattr(_aten, name.rstrip("_"), packet) if namespace == "aten" and name.endswith("_") else packet
    if packet in flop_registry:
        return flop_registry[packet](*args, **kwargs, out_val=out)
    if namespace not in KNOWN_NAMESPACES or (namespace == "aten" and _computes(name)):
        raise unknown_operator(str(operator))
    return 0


def hidden_memory(operator: Any, args: Sequence[Any]) -> int:
    """Bytes that a call made of several operators takes for a moment, of which only the whole is seen.

    `_safe_softmax` looks up where scores are -inf, and whether a row is so throughout, and puts a zero there; so on
    every device.
    """
    if operator is not _aten._safe_softmax.default:
        return 0
    scores = args[0]
    return scores.numel() + scores.numel() // scores.shape[-1] + scores.element_size()


def message(operator: Any, args: Sequence[Any], out: Any) -> tuple[str, str, int] | None:
    """Of a call that sends or receives: what it does, the name of its group, bytes; None for all other operators.

    Bytes are those of the whole tensor on the side where it is larger: gathered, to be scattered, sent.

    Raises:
        UserError: nobody knows what the operator sends.
    """
    namespace, _, name = str(operator._overloadpacket).partition(".")
    if namespace not in ("c10d", "_c10d_functional") or name in ("wait_tensor", "barrier"):
        return None
    if name not in _NAMES:
        raise unknown_operator(str(operator))
    if namespace == "_c10d_functional":
        larger = out if name == "all_gather_into_tensor" else args[0]
        group = next(arg for arg in reversed(args) if isinstance(arg, str))
        return _NAMES[name], group, _bytes(larger)
    group = dist.ProcessGroup.unbox(args[1 if name in _GROUP_SECOND else 2]).group_name
    return _NAMES[name], group, _bytes(args[_LARGER_SIDE.get(name, 0)])


def unknown_operator(operator: str) -> UserError:
    """What to say of an operator that the planner does not know."""
    return UserError(
        f"plan: the step calls {operator}, whose work, memory or messages the planner does not know. It does not "
        "guess; leave out the option that brings it in, or run a few steps and read `memory` in metrics.jsonl."
    )


def _computes(name: str) -> bool:
    return (
        name != "linalg_vector_norm" and any(part in name.split("_") or name.startswith(part) for part in COMPUTING)
    ) or "attention" in name


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_bytes(tensor) for tensor in tensors)


def _attention(args: Sequence[Any], matmuls: tuple[int, int, int]) -> int:
    """Two matmuls forward, five backward, of which a causal mask leaves half."""
    first, products, causal_at = matmuls
    query, key = args[first], args[first + 1]
    batch, heads, rows, width = query.shape
    every = 2 * batch * heads * rows * key.shape[2] * width * products
    return every // 2 if len(args) > causal_at and args[causal_at] is True else every


_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu: (0, 2, 4),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (1, 5, 7),
    _aten._scaled_dot_product_efficient_attention: (0, 2, 6),
    _aten._scaled_dot_product_efficient_attention_backward: (1, 5, 11),
}
"""Where the query is among the arguments, matmuls, and where it says that the mask is causal."""
