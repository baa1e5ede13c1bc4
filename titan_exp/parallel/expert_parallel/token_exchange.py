"""Token exchange of expert parallelism: rows sorted by expert go to the experts' ranks by all-to-all, and back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from titan_exp.parallel.all_to_all import all_to_all_rows, finish_count_exchange, return_rows, start_count_exchange
from titan_exp.parallel.expert_parallel.received import Received


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
