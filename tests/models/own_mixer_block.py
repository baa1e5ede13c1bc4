"""The block of `own_mixer`."""

from typing import Any

import torch
from torch import Tensor, nn

from titan_exp.models.blocks.linear import Linear
from titan_exp.models.blocks.transformer import RMSNorm


class MixerBlock(nn.Module):
    """Exponential mean over earlier tokens, then a linear layer."""

    def __init__(self, dim: int, decay: float) -> None:
        super().__init__()
        self.norm, self.mix, self.decay = RMSNorm(dim, 1e-5), Linear(dim, dim, 0.02), decay

    def forward(self, x: Tensor, rope: Any, mask: Any) -> Tensor:
        """One layer."""
        order = torch.arange(x.shape[1], device=x.device)
        weights = torch.where(order[:, None] >= order, self.decay ** (order[:, None] - order).clamp(0), 0.0)
        return x + self.mix(weights.to(x.dtype) @ self.norm(x))
