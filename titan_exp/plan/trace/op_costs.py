"""Operator costs: FLOPs, bytes, classes of kernels, and messages.

The rows that a rank receives for its experts depend on the data; we assume uniform routing, in which every rank of an
expert-parallel group receives as many rows as it sends. Async tensor parallelism fuses messages with matmuls. torch's
compiler decides which, on fake tensors too if it believes that there are NCCL and symmetric memory.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from titan_exp.config.errors.user_error import UserError
from titan_exp.ops.matmul_flops import GROUPED, matmul_flops
from titan_exp.parallel.mesh import group_named
from titan_exp.plan.trace.torch_patches import replaced_attributes

_LOAD: ContextVar[float] = ContextVar("expert load", default=1.0)  # ratio of received to sent rows
EXCHANGES = ("titan_exp.all_to_all_rows", "titan_exp.return_rows")
"""Operators that exchange tokens between the ranks of an expert-parallel group."""
SYMMETRIC_EXCHANGES = ("titan_exp.symmetric_dispatch", "titan_exp.symmetric_return")
"""Token exchanges through symmetric memory, whose results have room for more rows than arrive."""


@contextmanager
def assume_expert_load(load: float) -> Iterator[None]:
    """Assume in the `with` block that this rank's experts receive `load` times the mean number of rows."""
    token = _LOAD.set(load)
    try:
        yield
    finally:
        _LOAD.reset(token)


def exchanged_rows(operator: Any, args: tuple[Any, ...]) -> Any:
    """Result of a token exchange on fake tensors, where counts are unknown; None for other calls."""
    name = str(operator._overloadpacket)
    if name not in EXCHANGES + SYMMETRIC_EXCHANGES or type(args[0]) is not FakeTensor:
        return None
    if name in SYMMETRIC_EXCHANGES:
        return operator(*args)  # the operator's body would need symmetric memory
    rows, _, _, size, _ = args
    return rows.new_empty((_received(rows) if size is None else size, *rows.shape[1:]))


def filled_share(operator: Any, args: tuple[Any, ...]) -> float | None:
    """Share of the room for received rows that is filled; None for a call without such room."""
    if str(operator._overloadpacket) != SYMMETRIC_EXCHANGES[0]:
        return None
    rows, _, room, _ = args
    return min(1.0, _received(rows) / room)


def _received(rows: Tensor) -> int:
    return round(rows.shape[0] * _LOAD.get())


GATHERS = ("symm_mem.fused_all_gather_matmul", "symm_mem.fused_all_gather_scaled_matmul")
"""Operators that gather tokens and multiply each piece as it comes."""
SCATTERS = ("symm_mem.fused_matmul_reduce_scatter", "symm_mem.fused_scaled_matmul_reduce_scatter")
"""Operators that send each piece of a product as it is computed, and sum the pieces received."""
COPIES = 2  # number of copies in an exchange beside its own kernel, without a few small kernels
BESIDE = " beside "
"""Separator between the kind of a message and the shapes of the weights [inputs, outputs] that it overlaps with."""


class Message(NamedTuple):
    """Message of an operator, which through symmetric memory does more than send it."""

    kind: str  # `all-gather`, `all-gather beside 4096 x 1536`, `all-to-all`
    group: str  # name of the process group
    size: int  # bytes on the larger side: the gathered tensor, the tensor to scatter, the sent tensor
    flops: int = 0
    temporary: int = 0  # bytes allocated and freed within the call: pieces received but not returned
    moved: int = 0
    """Bytes read and written beside matmuls and messages: sums of pieces, copies to and from symmetric memory."""
    launches: int = 0  # operators that are launched beside the message; 0 without symmetric memory


def assumes_symmetric_memory() -> AbstractContextManager[None]:
    """Make the fake process group claim symmetric memory in the `with` block."""
    return replaced_attributes(
        (dist, "is_nccl_available", lambda: True),
        (symmetric_memory, "is_nvshmem_available", lambda: True),
        (symmetric_memory, "set_backend", lambda _: None),
        (symmetric_memory, "is_symm_mem_enabled_for_group", lambda _: True),
        (symmetric_memory, "enable_symm_mem_for_group", lambda _: None),
    )


def _message_beside_matmuls(name: str, args: Sequence[Any], out: Any) -> Message:
    left, weights = args[0], args[1] if isinstance(args[1], Sequence) else [args[1]]
    group = next(arg for arg in reversed(args) if isinstance(arg, str))
    shapes = ", ".join(f"{inputs} x {outputs}" for inputs, outputs in (weight.shape for weight in weights))
    degree, flops = group_named(group).size(), 2 * left.numel() * sum(weight.shape[1] for weight in weights)
    launches = degree * (len(weights) + 1)
    if name in SCATTERS:
        piece, size = _bytes(out), degree * _bytes(out)
        return Message(f"reduce-scatter{BESIDE}{shapes}", group, size, flops, size, size + piece, launches)
    piece, size = _bytes(left), degree * _bytes(left)
    temporary, kind = 0 if isinstance(out[0], Tensor) else size, f"all-gather{BESIDE}{shapes}"
    return Message(kind, group, size, degree * flops, temporary, 2 * piece, launches)


KNOWN_NAMESPACES = ("aten", "c10d", "_c10d_functional", "fsdp", "prims", "titan_exp")
"""Namespaces of known operators; those of other libraries may allocate untraced memory."""
COMPUTING = ("mm", "bmm", "baddbmm", "addmm", "conv", "attention", "lstm", "gru", "linalg", "fft", "flex")
"""Parts of names of aten operators that FLOPs bound, not bytes."""
SCALED_MATMULS = ("aten._scaled_mm", "aten._scaled_grouped_mm", GATHERS[1], SCATTERS[1])
MATMULS = ("aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm", SCALED_MATMULS[0], *GATHERS, *SCATTERS)
"""Operators computed by cuBLAS."""
_aten = torch.ops.aten
_OVERWRITING = ("zero_", "fill_", "copy_", "_foreach_zero_", "_foreach_copy_")
"""Operators that overwrite their first argument without reading it."""
_GATHERS = ("embedding", "gather", "index", "index_select", "take")
"""Operators that read as many elements of their first argument as they return."""
_GROUP_SECOND = ("allreduce_", "broadcast_", "send", "recv_")
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
    """FLOPs of a call, 2 per multiply-add; 0 if it is bound by bytes or unknown."""
    packet = operator._overloadpacket
    if packet in _ATTENTION:
        first, matmuls, causal_at = _ATTENTION[packet]
        query, key = args[first], args[first + 1]
        batch, heads, rows, width = query.shape
        flops = 2 * batch * heads * rows * key.shape[2] * width * matmuls
        return flops // 2 if len(args) > causal_at and args[causal_at] is True else flops
    flops = matmul_flops(operator, args, kwargs, out)
    if flops is not None:
        return flops
    if packet is _aten.linalg_qr:
        rows, columns = args[0].shape[-2:]
        return 4 * args[0].numel() * min(rows, columns)  # Householder vectors, then Q
    if packet is _aten._linalg_eigh:
        return 9 * args[0].numel() * args[0].shape[-1]  # tridiagonal form, its eigenvectors, and these rotated back
    if packet is _aten.linalg_solve_triangular:
        return args[1].numel() * args[0].shape[-1]  # half a square matrix for each column
    return 0


@lru_cache
def is_unknown(operator: Any) -> bool:
    """True if we know neither the FLOPs of an operator whose count is 0, nor the memory that it takes within a call."""
    packet = operator._overloadpacket
    namespace, _, name = str(packet).partition(".")
    if str(packet) in GROUPED:
        return namespace == "aten"  # its groups are on another side than those that we count
    if str(packet) in (*SYMMETRIC_EXCHANGES, *GATHERS, *SCATTERS) or packet in flop_registry:
        return False
    if namespace != "aten" or name == "linalg_vector_norm":
        return namespace not in KNOWN_NAMESPACES
    return "attention" in name or any(part in name.split("_") or name.startswith(part) for part in COMPUTING)


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
    """Bytes allocated and freed inside a call that CUDA and CPU decompose below the dispatcher. `_safe_softmax`
    compares scores with -inf, reduces the result over rows, and masks these rows with a zero."""
    if operator is not _aten._safe_softmax.default:
        return 0
    scores = args[0]
    return scores.numel() + scores.numel() // scores.shape[-1] + scores.element_size()


def message_of(operator: Any, args: Sequence[Any], out: Any) -> Message | None:
    """Message of a communication operator; None for other operators. Raises UserError if the operator is unknown."""
    name = str(operator._overloadpacket)
    if name in SYMMETRIC_EXCHANGES:
        # Rows are copied to symmetric memory, and results from it. Only the sent rows travel, not all the room for
        # received rows, which one of the two tensors is.
        sizes = [_bytes(args[0]), _bytes(out if isinstance(out, Tensor) else out[0])]
        return Message("all-to-all", args[-1], min(sizes), moved=2 * sum(sizes), launches=COPIES)
    if name in GATHERS + SCATTERS:
        return _message_beside_matmuls(name, args, out)
    if name in EXCHANGES:
        return Message("all-to-all", args[-1], _bytes(args[0]))
    namespace, _, collective = name.partition(".")
    if namespace not in ("c10d", "_c10d_functional") or collective in ("wait_tensor", "barrier"):
        return None
    if collective not in _NAMES:
        raise unknown_operator(str(operator))
    if namespace == "_c10d_functional":
        larger = out if collective == "all_gather_into_tensor" else args[0]
        group = next(arg for arg in reversed(args) if isinstance(arg, str))
        return Message(_NAMES[collective], group, _bytes(larger))
    group = dist.ProcessGroup.unbox(args[1 if collective in _GROUP_SECOND else 2]).group_name
    return Message(_NAMES[collective], group, _bytes(args[_LARGER_SIDE.get(collective, 0)]))


def unknown_operator(operator: str) -> UserError:
    """Error for an operator unknown to the planner."""
    return UserError(
        f"plan: the step calls {operator}, and the planner does not know its FLOPs, memory or messages. Leave out the "
        "option that uses it, or run a few steps (training.steps=5) and read `memory` in metrics.jsonl."
    )


def _bytes(tensors: Any) -> int:
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(map(_bytes, tensors))


_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu: (0, 2, 4),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (1, 5, 7),
    _aten._scaled_dot_product_efficient_attention: (0, 2, 6),
    _aten._scaled_dot_product_efficient_attention_backward: (1, 5, 11),
}
"""Index of the query argument, number of matmuls, and index of the causal flag, which halves their FLOPs."""


BLOCK_MATMULS, EXPERT_MATMULS, HEAD_MATMULS = "matmuls in blocks", "matmuls of experts", "matmuls of the head"
_IN_ATTENTION = ATTENTION, ATTENTION_BACKWARD = "attention, forward", "attention, backward"
_IN_BLOCKS = BLOCKS, BLOCKS_BACKWARD = "elementwise in blocks, forward", "elementwise in blocks, backward"
_AT_ENDS = LOSS, EMBEDDING = "loss", "embedding"
STREAMS = COMPUTE_WEIGHTS, GRADIENTS, NORM, OPTIMIZER = "compute weights", "gradients", "norm and clip", "optimizer"
"""Classes of kernels that stream over all weights or gradients, as a copy does."""
KERNEL_CLASSES = (BLOCK_MATMULS, EXPERT_MATMULS, HEAD_MATMULS, *_IN_ATTENTION, *_IN_BLOCKS, *_AT_ENDS, *STREAMS)
"""Classes in order. Forward passes include recomputation. `compute weights` are copies of weights in another dtype, or
gathered ones; `gradients` are casts and sums after backward, and copies for their reduction. Experts' matmuls count
FLOPs and bytes, since reading an expert's weights bounds a matmul with few rows."""
MEASURES = ("flops", "fp8_flops", "bytes", "launches")
"""Measures of a class; float8 matmuls count in `flops`, too. A multi-tensor operator is one launch."""
_FSDP = {"all_gather_copy_in": COMPUTE_WEIGHTS, "split_with_sizes_copy": COMPUTE_WEIGHTS, "chunk_cat": GRADIENTS}
"""Classes of FSDP2's own operators."""


def kernel_kind(operator: Any, flops: int) -> str:
    """Kind of an operator: `matmul`, `cast` or `elementwise`, or the only class in which it occurs."""
    name = operator._schema.name.partition("::")[2]
    if "attention" in name:
        return ATTENTION_BACKWARD if "backward" in name else ATTENTION
    if "embedding" in name:
        return EMBEDDING
    if operator.namespace == "fsdp":
        return next((found for part, found in _FSDP.items() if part in name), "elementwise")
    if str(operator._overloadpacket) in GROUPED:
        return EXPERT_MATMULS
    if flops:
        return "matmul"
    return "cast" if name == "_to_copy" else "elementwise"


def kernel_class(kind: str, where: str, outside_passes: str) -> str:
    """Class of a kernel of a kind in a phase of the step. `outside_passes` is the class of elementwise kernels outside
    forward and backward passes, else empty."""
    in_block = ", block" in where
    if kind in KERNEL_CLASSES:
        found = kind
    elif kind == "matmul":
        found = BLOCK_MATMULS if in_block else HEAD_MATMULS
    elif outside_passes:
        found = GRADIENTS if kind == "cast" and outside_passes == NORM else outside_passes
    elif where.startswith("backward"):
        # After the first block, gradients of weights that are used twice are summed.
        found = BLOCKS_BACKWARD if in_block else GRADIENTS
    elif in_block:
        found = BLOCKS
    else:
        found = LOSS if where.startswith("forward") and "embedding" not in where else EMBEDDING
    return found
