"""Exchange of tokens among expert ranks: all-to-all, or symmetric memory that every rank writes to."""

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
from titan_exp.parallel.collectives import (
    all_to_all_rows,
    finish_count_exchange,
    group_named,
    return_rows,
    start_count_exchange,
)
from titan_exp.parallel.symmetric_room import worst_case


@dataclass(frozen=True)
class Received:
    """Rows that a rank received for its experts."""

    rows: Float[Tensor, "received dim"]
    """Rows, sorted by expert, source rank and token."""
    weights: Float[Tensor, " received"] | None
    """Weight of each row, if sent."""
    ends: Int32[Tensor, " local"]
    """End of the rows of each of this rank's experts."""
    order: Any
    """Order or placement of the rows, by which the exchange gives them back."""


@dataclass(frozen=True)
class TokenExchange:
    """Exchange of one layer's rows among expert-parallel ranks, each of which has as many experts."""

    sent: Int64[Tensor, " ranks"]
    """Rows that this rank sends to each rank, on the CPU."""
    received: Int64[Tensor, " ranks"]
    """Rows that it receives from each rank, on the CPU."""
    counts: Int64[Tensor, "ranks local"]
    """Rows received from each rank for each of this rank's experts."""
    group: str
    """Name of the ranks' process group."""

    @staticmethod
    def start(ends: Int32[Tensor, " experts"], ranks: int, group: str) -> "Callable[[], TokenExchange]":
        """Start to exchange the counts of rows with these ends per expert.

        The result waits for them, which synchronizes with the host, once.
        """
        counts = ends.diff(prepend=ends.new_zeros(1)).long().view(ranks, -1)
        started = start_count_exchange(counts, group)

        def finish() -> TokenExchange:
            received, rows = finish_count_exchange(*started)
            return TokenExchange(rows[0], rows[1], received, group)

        return finish

    def dispatch(self, rows: Float[Tensor, "rows dim"], weights: Float[Tensor, " rows"] | None) -> Received:
        """Rows for this rank's experts, with their weights."""
        found = all_to_all_rows(rows, self.sent, self.received, None, self.group)
        order = RowOrder.by_expert(self.counts, found.shape[0])
        if weights is not None:
            weights = order.apply(all_to_all_rows(weights, self.sent, self.received, found.shape[0], self.group))
        return Received(order.apply(found), weights, self.counts.sum(0).cumsum(0, dtype=torch.int32), order)

    def give_back(
        self, rows: Float[Tensor, "received dim"], received: Received, size: int
    ) -> Float[Tensor, "rows dim"]:
        """Rows of this rank's tokens, in the order and number `size` in which they were dispatched."""
        # Weighted rows are summed as they are, so backward needs none of them.
        send = all_to_all_rows if received.weights is None else return_rows
        return send(received.order.undo(rows), self.received, self.sent, size, self.group)


@dataclass(frozen=True)
class RowOrder:
    """Permutation of rows and its inverse."""

    source: Int64[Tensor, " rows"]
    """Row that comes to each place."""
    target: Int64[Tensor, " rows"]
    """Place that each row comes to."""

    @staticmethod
    def by_expert(counts: Int64[Tensor, "ranks local"], size: int) -> "RowOrder":
        """Order by expert, then rank, of `size` rows sorted by rank, then expert."""
        by_rank, by_expert = counts.flatten(), counts.t().flatten()
        starts_by_rank = (by_rank.cumsum(0) - by_rank).view_as(counts)
        starts_by_expert = (by_expert.cumsum(0) - by_expert).view_as(counts.t()).t()
        shift = starts_by_rank - starts_by_expert
        rows = torch.arange(size, device=counts.device)
        # Without a size, repeat_interleave synchronizes.
        source = rows + shift.t().flatten().repeat_interleave(by_expert, output_size=size)
        target = rows - shift.flatten().repeat_interleave(by_rank, output_size=size)
        return RowOrder(source, target)

    def apply(self, rows: Tensor) -> Tensor:
        """Rows in this order."""
        return _Reorder.apply(rows, self.source, self.target)  # type: ignore[return-value]  # a Tensor

    def undo(self, rows: Tensor) -> Tensor:
        """Rows in the order before."""
        return _Reorder.apply(rows, self.target, self.source)  # type: ignore[return-value]  # a Tensor


class _Reorder(torch.autograd.Function):
    """Permutation whose gradient gathers too: scattering would add."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(target)
        return rows.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (target,) = ctx.saved_tensors
        return gradients[0].index_select(0, target), None, None


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
