"""Token padding for grouped GEMM: rows sorted by expert are moved so that each expert has a multiple of some number.

Numbers that share a scale along tokens then belong to one expert, and kernels get the group sizes that they require.
The buffer has room for the worst case, so that no count comes to the host.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class TokenPadding:
    """Positions of rows in the padded buffer, and back."""

    ends: Tensor
    """End of each expert's padded rows, int32 [experts]; every expert has some rows, if only zeros."""
    expert: Tensor
    """Expert of each padded row, [room]; the number of experts for padding after the last."""
    place: Tensor
    """Padded position of each row, [tokens]."""
    moved: Tensor
    """True for rows that belong to an expert, [tokens]."""
    source: Tensor
    """Source row of each padded position, [room]."""
    filled: Tensor
    """True for padded positions that hold a row, [room]."""

    @staticmethod
    def of(ends: Tensor, tokens: int, multiple: int) -> "TokenPadding":
        """Padding of `tokens` rows with int32 `ends` [experts], to a `multiple` of rows per expert."""
        experts, room = ends.shape[0], multiple * (-(-tokens // multiple) + ends.shape[0])
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        sizes = ((ends - starts + multiple - 1) // multiple).clamp(min=1) * multiple
        after = sizes.cumsum(0, dtype=torch.int32)
        # Distance by which each expert's rows move.
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
        """Pad rows, [tokens, columns] to [room, columns]; differentiable."""
        return _Move.apply(rows, self.source, self.filled, self.place, self.moved)  # type: ignore[return-value]

    def collect(self, rows: Tensor) -> Tensor:
        """Remove the padding, [room, columns] to [tokens, columns]; zeros for rows of no expert; differentiable."""
        return _Move.apply(rows, self.place, self.moved, self.source, self.filled)  # type: ignore[return-value]


def experts_of_rows(ends: Tensor, rows: int) -> Tensor:
    """Expert of each row, int64 [rows]; the number of experts for rows after the last end."""
    return torch.searchsorted(ends, torch.arange(rows, device=ends.device, dtype=ends.dtype), right=True)


class _Move(torch.autograd.Function):
    """Gathers rows in both directions: scattering would need atomics on a GPU."""

    @staticmethod
    def forward(  # noqa: PLR0917  # autograd functions take positional arguments
        ctx: Any, rows: Tensor, chosen: Tensor, kept: Tensor, back: Tensor, kept_back: Tensor
    ) -> Tensor:
        ctx.save_for_backward(back, kept_back)
        return _choose(rows, chosen, kept)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _choose(gradients[0], *ctx.saved_tensors), None, None, None, None


def _choose(rows: Tensor, chosen: Tensor, kept: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        # Received rows may be none, which the compiler cannot ask: one of zeros follows, in no memory.
        rows = F.pad(rows, (0, 0, 0, 1))
    elif rows.shape[0] == 0:
        return rows.new_zeros(chosen.shape[0], rows.shape[1])
    return rows.index_select(0, chosen).masked_fill(~kept[:, None], 0)
