"""Messages through symmetric memory: those that async tensor parallelism fuses with matmuls, and exchanged tokens.

Torch's compiler decides what it fuses, also for fake tensors, if it believes that there is NCCL and symmetric memory.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from titan_exp.parallel.collectives import group_named
from titan_exp.plan.trace.received_rows import SYMMETRIC_EXCHANGES
from titan_exp.plan.trace.torch_patches import replaced_attributes

GATHERS = ("symm_mem.fused_all_gather_matmul", "symm_mem.fused_all_gather_scaled_matmul")
"""Operators that gather tokens and multiply each piece as it comes."""
SCATTERS = ("symm_mem.fused_matmul_reduce_scatter", "symm_mem.fused_scaled_matmul_reduce_scatter")
"""Operators that send each piece of a product as it is computed, and sum the received ones."""
COPIES = 2
"""Copies of an exchange beside its own kernel, a few small kernels left out."""
BESIDE = " beside "
"""Separates the kind of a message from the shapes of the weights [inputs, outputs] beside which it is sent."""


class SymmetricMessage(NamedTuple):
    """Message of an operator that does more than send it."""

    kind: str
    """`all-gather beside 4096 x 1536`, `all-to-all`."""
    group: str
    """Name of the process group."""
    size: int
    """Bytes gathered, to scatter, or sent."""
    flops: int
    """FLOPs of its matmuls."""
    temporary: int
    """Bytes allocated and freed within the call: pieces received but not returned."""
    moved: int
    """Bytes read and written outside of matmuls and messages: sums of received pieces, copies to and from symmetric
    memory."""
    launches: int
    """Matmuls and copies."""


@contextmanager
def assumes_symmetric_memory() -> Iterator[None]:
    """Let the fake process group have symmetric memory in the `with` block."""
    with replaced_attributes(
        (dist, "is_nccl_available", lambda: True),
        (symmetric_memory, "is_nvshmem_available", lambda: True),
        (symmetric_memory, "set_backend", lambda _: None),
        (symmetric_memory, "is_symm_mem_enabled_for_group", lambda _: True),
        (symmetric_memory, "enable_symm_mem_for_group", lambda _: None),
    ):
        yield


def symmetric_message(operator: Any, args: Sequence[Any], out: Any) -> SymmetricMessage | None:
    """Message of an operator through symmetric memory; None for other operators."""
    name = str(operator._overloadpacket)
    if name in SYMMETRIC_EXCHANGES:
        return _exchange(args, out)
    if name not in GATHERS + SCATTERS:
        return None
    left, weights = args[0], args[1] if isinstance(args[1], Sequence) else [args[1]]
    group = next(arg for arg in reversed(args) if isinstance(arg, str))
    shapes = ", ".join(f"{inputs} x {outputs}" for inputs, outputs in (weight.shape for weight in weights))
    degree, flops = group_named(group).size(), 2 * left.numel() * sum(weight.shape[1] for weight in weights)
    launches = degree * (len(weights) + 1)
    if name in SCATTERS:
        piece = out.numel() * out.element_size()
        size = degree * piece
        return SymmetricMessage(f"reduce-scatter{BESIDE}{shapes}", group, size, flops, size, size + piece, launches)
    piece = left.numel() * left.element_size()
    temporary = 0 if isinstance(out[0], Tensor) else degree * piece
    kind = f"all-gather{BESIDE}{shapes}"
    return SymmetricMessage(kind, group, degree * piece, degree * flops, temporary, 2 * piece, launches)


def _exchange(args: Sequence[Any], out: Any) -> SymmetricMessage:
    """Token exchange: rows are copied to symmetric memory, and results from it. Only rows that are sent travel, and not
    all the room for received ones, which one of the two tensors is."""
    sent, result = args[0], out if isinstance(out, Tensor) else out[0]
    sizes = [tensor.numel() * tensor.element_size() for tensor in (sent, result)]
    return SymmetricMessage("all-to-all", args[-1], min(sizes), 0, 0, 2 * sum(sizes), COPIES)
