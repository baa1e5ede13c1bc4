"""Operator costs: FLOPs of matmuls and attention, bytes of messages. Unknown operators raise an error."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from titan_exp.config.errors.user_error import UserError
from titan_exp.ops.matmul_flops import matmul_flops
from titan_exp.plan.trace.received_rows import EXCHANGES
from titan_exp.plan.trace.symmetric_messages import GATHERS, SCATTERS

KNOWN_NAMESPACES = ("aten", "c10d", "_c10d_functional", "fsdp", "prims", "titan_exp")
"""Namespaces of traceable operators; operators of other libraries may allocate untraced memory."""
COMPUTING = ("mm", "bmm", "baddbmm", "addmm", "conv", "attention", "lstm", "gru", "linalg", "fft", "flex")
"""Parts of names of aten operators that are bound by FLOPs, not by bytes."""

SCALED_MATMULS = ("aten._scaled_mm", "aten._scaled_grouped_mm", GATHERS[1], SCATTERS[1])
"""Float8 matmuls."""
MATMULS = ("aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm", SCALED_MATMULS[0], *GATHERS, *SCATTERS)
"""Operators computed by cuBLAS."""

_aten, _c10d, _functional = torch.ops.aten, torch.ops.c10d, torch.ops._c10d_functional

_OVERWRITING = ("zero_", "fill_", "copy_", "_foreach_zero_", "_foreach_copy_")
"""Operators that write their first argument without reading it."""
_GATHERS = ("embedding", "gather", "index", "index_select")
"""Operators that read as many elements of their first argument as they return."""

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
"""Kinds of messages, by operator."""
_LARGER_SIDE = {"_allgather_base_": 0, "_reduce_scatter_base_": 1, "alltoall_base_": 1}
"""Index of the argument on the larger side (gathered, or not yet scattered); 0 for other operators."""


def count_flops(operator: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """FLOPs of a call, 2 per multiply-add; 0 if it is bound by bytes.

    Raises:
        UserError: the operator is unknown.
    """
    packet = operator._overloadpacket
    if packet in _ATTENTION:
        return _attention(args, _ATTENTION[packet])
    flops = matmul_flops(operator, args, kwargs, out)
    if flops is not None:
        return flops
    if packet is _aten.linalg_qr:
        rows, columns = args[0].shape[-2:]
        return 4 * args[0].numel() * min(rows, columns)  # Householder vectors, then Q
    if packet is _aten._linalg_eigh:
        return 9 * args[0].numel() * args[0].shape[-1]  # tridiagonal form, its eigenvectors, and these rotated back
    if packet is _aten.linalg_solve_triangular:
        return args[1].numel() * args[0].shape[-1]  # half of a square matrix, for each column
    namespace, _, name = str(packet).partition(".")
    if namespace not in KNOWN_NAMESPACES or (namespace == "aten" and _computes(name)):
        raise unknown_operator(str(operator))
    return 0


def count_bytes(operator: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]) -> int:
    """Bytes read and written by a kernel that is bound by bytes; an allocation moves none."""
    name = operator._schema.name.partition("::")[2]
    if name.startswith(("empty", "new_empty")):
        return 0
    read, written = list[Tensor](), list[Tensor]()
    for place, argument in enumerate(operator._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        # Gradients are declared as written by fused optimizers, which only read them.
        writes = argument.alias_info is not None and argument.alias_info.is_write and argument.name != "grads"
        written += tensors if writes else []
        read += [] if writes and (argument.is_out or (place == 0 and name in _OVERWRITING)) else tensors
    moved = _bytes(read) + _bytes(outputs or written)
    if name in _GATHERS and read:
        table = read[0]
        moved -= max(0, _bytes(table) - sum(out.numel() for out in outputs) * table.element_size())
    return moved


def decomposed_workspace(operator: Any, args: Sequence[Any]) -> int:
    """Bytes allocated and freed inside a call that CUDA and CPU decompose below the dispatcher.

    `_safe_softmax` compares scores with -inf, reduces that over rows, and masks these rows with a zero.
    """
    if operator is not _aten._safe_softmax.default:
        return 0
    scores = args[0]
    return scores.numel() + scores.numel() // scores.shape[-1] + scores.element_size()


def parse_message(operator: Any, args: Sequence[Any], out: Any) -> tuple[str, str, int] | None:
    """Kind, process group name and bytes of a communication operator, else None.

    Bytes are counted on the larger side: the gathered tensor, the tensor to scatter, the sent tensor.

    Raises:
        UserError: the operator is unknown.
    """
    if str(operator._overloadpacket) in EXCHANGES:
        return "all-to-all", args[-1], _bytes(args[0])
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
    """Error for an operator unknown to the planner."""
    return UserError(
        f"plan: the step calls {operator}, whose FLOPs, memory or messages the planner does not know. Leave out the "
        "option that uses it, or run a few steps and read `memory` in metrics.jsonl."
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
    """Two matmuls forward, five backward; a causal mask halves them."""
    first, count, causal_at = matmuls
    query, key = args[first], args[first + 1]
    batch, heads, rows, width = query.shape
    flops = 2 * batch * heads * rows * key.shape[2] * width * count
    return flops // 2 if len(args) > causal_at and args[causal_at] is True else flops


_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu: (0, 2, 4),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (1, 5, 7),
    _aten._scaled_dot_product_efficient_attention: (0, 2, 6),
    _aten._scaled_dot_product_efficient_attention_backward: (1, 5, 11),
}
"""Index of the query argument, number of matmuls, and index of the causal flag."""
