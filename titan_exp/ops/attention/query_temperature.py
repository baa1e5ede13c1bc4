"""Query temperature by position (Llama 4): factors of queries that keep long sequences' softmax sharp."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class TemperatureTable(nn.Module):
    """Factors 1 + coefficient · ln(1 + floor((position + 1) / floor_scale)), in fp32.

    A non-persistent buffer, which `reset` computes once its memory is allocated.
    """

    factors: Tensor

    def __init__(self, length: int, coefficient: float, floor_scale: int) -> None:
        super().__init__()
        self.length, self.coefficient, self.floor_scale = length, coefficient, floor_scale
        self.register_buffer("factors", torch.empty(length), persistent=False)

    @torch.no_grad()
    def reset(self) -> None:
        """Fill the table, in fp64 on the CPU so that every device holds the same values."""
        steps = (torch.arange(self.length) + 1) // self.floor_scale
        self.factors.copy_(1 + self.coefficient * steps.double().log1p())

    def forward(self, seq: int, positions: Int[Tensor, "batch seq"] | None) -> Float[Tensor, "batch_or_1 seq 1 1"]:
        """Factors of the given positions, or of 0 .. seq - 1."""
        found = self.factors[None, :seq] if positions is None else self.factors[positions]
        return found[..., None, None]
