"""Axial rotary position embedding (FLUX.1): each axis of a position rotates features of its own."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from titan_exp.ops.attention.rope import Frequencies, RotaryEmbedding


class AxialRotaryEmbedding(nn.Module):
    """RoPE caches of several axes, `widths` features of a head each, for coordinates below `length`."""

    def __init__(self, widths: Sequence[int], length: int, theta: float) -> None:
        super().__init__()
        self.axes = nn.ModuleList(RotaryEmbedding(width, length, Frequencies(theta)) for width in widths)

    def reset(self) -> None:
        """Fill the caches."""
        for axis in self.axes:
            axis.reset()  # type: ignore[operator]  # a cache's method

    def forward(
        self, positions: Int[Tensor, "batch_or_1 seq axes"]
    ) -> tuple[Float[Tensor, "batch_or_1 seq 1 half"], Float[Tensor, "batch_or_1 seq 1 half"]]:
        """Cosines and sines of the axes, one after the other, for `rotate`."""
        pairs = [axis(positions.shape[1], column) for axis, column in zip(self.axes, positions.unbind(-1), strict=True)]
        cos, sin = (torch.cat(parts, dim=-1) for parts in zip(*pairs, strict=True))
        return cos, sin


def grid_positions(text_tokens: int, rows: int, columns: int) -> Int[Tensor, "1 seq 3"]:
    """Positions of text tokens, all zero, then those of image patches (0, row, column) in reading order."""
    image = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), dim=-1).flatten(0, 1)
    positions = torch.zeros(1, text_tokens + rows * columns, 3, dtype=torch.int64)
    positions[0, text_tokens:, 1:] = image
    return positions
