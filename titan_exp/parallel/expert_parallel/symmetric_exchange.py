"""Token exchange through symmetric memory: ranks read each other's rows on the device, and the host waits for nothing.

torch's operators over NVSHMEM exchange the counts themselves, so no rank knows on the host how many rows it received:
results have room for the worst case, all tokens of the group, and no row is ever dropped. Rows lie by expert, then
source rank, then token, as all-to-all leaves them. What lies between and after them is uninitialized, and zeroed.
"""

import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.ops.autograd import keep_unsaved, unsaved_tensors
from titan_exp.ops.moe.permutation import experts_of_rows
from titan_exp.parallel.expert_parallel.received import Received
from titan_exp.parallel.expert_parallel.symmetric_room import worst_case
from titan_exp.parallel.process_groups import group_named


def use_symmetric_memory() -> None:
    """Have torch allocate symmetric memory through NVSHMEM; called before any is allocated.

    Raises:
        UserError: this machine or this build of torch has no NVSHMEM.
    """
    from torch.distributed import _symmetric_memory as memory

    if not (hasattr(torch.ops.symm_mem, "all_to_all_vdev_2d_offset") and memory.is_nvshmem_available()):
        reason = "it needs NVSHMEM, which this build of torch does not find here"
        remedy = "parallelism.token_exchange=all_to_all; or pip install nvidia-nvshmem-cu12 (cu13 for CUDA 13)"
        field = "parallelism.token_exchange"
        raise UserError(
            "Tokens cannot be exchanged through symmetric memory.",
            [Violation(field, "symmetric_memory", reason, remedy)],
        )
    memory.set_backend("NVSHMEM")


@dataclass(frozen=True)
class SymmetricExchange:
    """Exchange of one layer's rows among expert-parallel ranks, each of which has as many experts."""

    splits: Int64[Tensor, " experts"]
    """Rows that this rank sends to each expert."""
    room: int
    """Rows that fit into the results."""
    ranks: int
    """Ranks of the group."""
    group: str
    """Name of the ranks' process group."""

    @staticmethod
    def start(
        ends: Int32[Tensor, " experts"], tokens: int, choices: int, ranks: int, group: str
    ) -> "Callable[[], SymmetricExchange]":
        """Exchange of the rows of `tokens` tokens, with these ends per expert; there is nothing to wait for."""
        splits = ends.diff(prepend=ends.new_zeros(1)).long()
        return lambda: SymmetricExchange(
            splits, worst_case(tokens, choices, ends.shape[0] // ranks, ranks), ranks, group
        )

    def dispatch(self, rows: Float[Tensor, "rows dim"], weights: Float[Tensor, " rows"] | None) -> Received:
        """Rows for this rank's experts, with the weights and zeros in the rest of the room."""
        found, placement = symmetric_dispatch(rows, self.splits, self.room, self.group)
        if weights is not None:
            weights = symmetric_dispatch(weights[:, None], self.splits, self.room, self.group)[0][:, 0]
        return Received(found, weights, expert_ends(placement, self.ranks), placement)

    def give_back(
        self, rows: Float[Tensor, "received dim"], received: Received, size: int
    ) -> Float[Tensor, "rows dim"]:
        """Rows of this rank's tokens, in the order and number `size` in which they were dispatched."""
        return symmetric_return(rows, received.order, self.splits, size, self.group)


def expert_ends(placement: Int64[Tensor, "2 pieces"], ranks: int) -> Int32[Tensor, " local"]:
    """End of the rows of each of this rank's experts, with the free rows before those of the next expert.

    `placement` has the numbers and first rows of the pieces received for each local expert from each rank.
    """
    sizes, starts = placement.view(2, -1, ranks).unbind()
    return torch.cat([starts[1:, 0], (starts[-1, 0] + sizes[-1].sum())[None]]).int()


@torch.library.custom_op("titan_exp::symmetric_dispatch", mutates_args=())
def symmetric_dispatch(rows: Tensor, splits: Tensor, room: int, group: str) -> tuple[Tensor, Tensor]:
    """Send rows sorted by expert, `splits[e]` of them to expert e.

    Returns those for this rank's experts, zeros after them up to `room`, and their placement (see `expert_ends`).
    """
    ranks = group_named(group).size()
    sent, counts, found, placement = _BUFFERS.of("dispatch", rows, room, (splits.shape[0],), group)
    sent.copy_(rows)
    counts.copy_(splits)
    torch.ops.symm_mem.all_to_all_vdev_2d(sent, found, counts, placement, group)
    placement = placement.clone()
    sizes, starts = placement.view(2, -1, ranks).unbind()
    expert = experts_of_rows(expert_ends(placement, ranks), room).clamp(max=sizes.shape[0] - 1)
    filled = torch.arange(room, device=rows.device) < (starts[:, 0] + sizes.sum(1))[expert]
    return found.masked_fill(~filled[:, None], 0), placement


@symmetric_dispatch.register_fake
def _(rows: Tensor, splits: Tensor, room: int, group: str) -> tuple[Tensor, Tensor]:
    return rows.new_empty(room, rows.shape[1]), splits.new_empty(2, splits.shape[0])


@torch.library.custom_op("titan_exp::symmetric_return", mutates_args=())
def symmetric_return(rows: Tensor, placement: Tensor, splits: Tensor, size: int, group: str) -> Tensor:
    """Send rows of this placement back to where `symmetric_dispatch` got them, sorted as there."""
    sent, counts, found, back = _BUFFERS.of("return", rows, size, tuple(placement.shape), group)
    sent.copy_(rows)
    counts.copy_(placement)
    torch.ops.symm_mem.all_to_all_vdev_2d_offset(sent, found, counts, back, group)
    return found.clone()


@symmetric_return.register_fake
def _(rows: Tensor, placement: Tensor, splits: Tensor, size: int, group: str) -> Tensor:
    return rows.new_empty(size, rows.shape[1])


def _save_dispatch(ctx: Any, inputs: tuple[Tensor, Tensor, int, str], output: tuple[Tensor, Tensor]) -> None:
    rows, splits, _, ctx.group = inputs
    ctx.size = rows.shape[0]
    ctx.save_for_backward(output[1], splits)


def _dispatch_gradient(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None, None, None]:
    placement, splits = ctx.saved_tensors
    return symmetric_return(gradient.contiguous(), placement, splits, ctx.size, ctx.group), None, None, None


def _save_return(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int, str], output: Tensor) -> None:
    rows, _, splits, _, ctx.group = inputs
    ctx.room = rows.shape[0]
    keep_unsaved(ctx, splits)


def _return_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
    (splits,) = unsaved_tensors(ctx)
    rows, _ = symmetric_dispatch(gradient.contiguous(), splits, ctx.room, ctx.group)
    return rows, None, None, None, None


symmetric_dispatch.register_autograd(_dispatch_gradient, setup_context=_save_dispatch)
symmetric_return.register_autograd(_return_gradient, setup_context=_save_return)


class _SymmetricBuffers:
    """Symmetric memory of the operators, two sets for each kind of message, used in turn.

    An operator reads other ranks' rows after a barrier and has none at its end: a rank may write its next rows while
    others still read. The barrier of the next operator ends that, so a set is free again one operator later.
    """

    def __init__(self) -> None:
        self._sets: dict[Any, list[tuple[Tensor, ...]]] = {}
        self._turns: defaultdict[Any, int] = defaultdict(int)

    def of(self, kind: str, rows: Tensor, size: int, counts: tuple[int, ...], group: str) -> tuple[Tensor, ...]:
        """Buffers for rows and counts to send, for `size` rows to receive, and for their placement."""
        assert not isinstance(rows, FakeTensor), "the planner leaves out the body of the operators"
        key = (kind, tuple(rows.shape), rows.dtype, rows.device, size, counts, group)
        if key not in self._sets:
            shapes = ((rows.shape, rows.dtype), (counts, torch.int64), ((size, rows.shape[1]), rows.dtype))
            shapes = (*shapes, ((2, counts[-1]), torch.int64))
            self._sets[key] = [
                tuple(allocate(shape, dtype, rows.device, group) for shape, dtype in shapes) for _ in range(2)
            ]
            bytes_taken = 2 * sum(buffer.numel() * buffer.element_size() for buffer in self._sets[key][0])
            logging.getLogger("titan_exp").info(
                "token exchange takes %.3g GiB of symmetric memory more", bytes_taken / 2**30
            )
        self._turns[key] += 1
        return self._sets[key][self._turns[key] % 2]


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, group: str) -> Tensor:
    """Symmetric memory of a group of ranks, which must call together."""
    from torch.distributed import _symmetric_memory as memory

    buffer = memory.empty(shape, dtype=dtype, device=device)
    memory.rendezvous(buffer, group_named(group))
    return buffer


_BUFFERS = _SymmetricBuffers()
