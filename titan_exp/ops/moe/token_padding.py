"""Rows sorted by expert, moved so that every expert has a multiple of some number of them, with zeros between.

Numbers that share a scale along tokens are then one expert's, and kernels find groups of the size that they want. Room
is made for the most that can be needed, so that no count has to come to the host.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenPadding:
    """Padded positions of rows, and the way back."""

    ends: Tensor
    """Where each expert's rows end after the move, int32 [experts]: every expert has some, if only zeros."""
    expert: Tensor
    """Expert of each padded row, [room]; the number of experts for padding."""
    place: Tensor
    """Where each row is moved to, [tokens]."""
    moved: Tensor
    """Whether it is anybody's, [tokens]."""
    source: Tensor
    """Which row is there after the move, [room]."""
    filled: Tensor
    """Whether there is one, or zeros, [room]."""

    @staticmethod
    def of(ends: Tensor, tokens: int, multiple: int) -> "TokenPadding":
        """The move of so many rows to groups of a multiple.

        Args:
            ends: where each expert's rows end, int32 [experts].
            tokens: rows.
            multiple: of rows for each expert.
        """
        experts, room = ends.shape[0], multiple * (-(-tokens // multiple) + ends.shape[0])
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        sizes = ((ends - starts + multiple - 1) // multiple).clamp(min=1) * multiple
        after = sizes.cumsum(0, dtype=torch.int32)
        # How far each expert's rows are moved.
        shift = after - sizes - starts
        expert, expert_after = experts_of_rows(ends, tokens), experts_of_rows(after, room)
        row = torch.arange(tokens, device=ends.device)
        row_after = torch.arange(room, device=ends.device)
        mine, mine_after = expert.clamp(max=experts - 1), expert_after.clamp(max=experts - 1)
        moved, source = expert < experts, row_after - shift[mine_after]
        filled = (expert_after < experts) & (source < ends[mine_after])
        return TokenPadding(
            after,
            expert_after,
            (row + shift[mine]).where(moved, 0),
            moved,
            source.where(filled, 0),
            filled,
        )

    def spread(self, rows: Tensor) -> Tensor:
        """Rows moved there, [tokens, columns] to [room, columns], with zeros between; differentiable."""
        return _Move.apply(rows, self.source, self.filled, self.place, self.moved)  # type: ignore[return-value]

    def collect(self, rows: Tensor) -> Tensor:
        """Rows moved back, [room, columns] to [tokens, columns]; zeros for rows of no expert; differentiable."""
        return _Move.apply(rows, self.place, self.moved, self.source, self.filled)  # type: ignore[return-value]


def experts_of_rows(ends: Tensor, rows: int) -> Tensor:
    """Expert of each row, int64 [rows]; the number of experts for rows of none."""
    return torch.searchsorted(ends, torch.arange(rows, device=ends.device, dtype=ends.dtype), right=True)


class _Move(torch.autograd.Function):
    """Both ways it is a choice of rows: a sum into rows would be atomic on a GPU."""

    @staticmethod
    def forward(  # noqa: PLR0917  # an autograd function takes arguments by place
        ctx: Any, rows: Tensor, chosen: Tensor, kept: Tensor, back: Tensor, kept_back: Tensor
    ) -> Tensor:
        ctx.save_for_backward(back, kept_back)
        return _choose(rows, chosen, kept)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _choose(gradients[0], *ctx.saved_tensors), None, None, None, None


def _choose(rows: Tensor, chosen: Tensor, kept: Tensor) -> Tensor:
    if rows.shape[0] == 0:
        return rows.new_zeros(chosen.shape[0], rows.shape[1])
    return rows.index_select(0, chosen).masked_fill(~kept[:, None], 0)
