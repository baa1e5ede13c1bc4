"""Rotary position embedding in real arithmetic (Su et al. 2021), with the published context scalings.

Rotates the pairs (i, i + head_dim / 2) of a head, Hugging Face's layout; real-valued, so that it fuses.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """RoPE cache: cosines and sines by position, in fp32.

    A non-persistent buffer, which `reset` computes once its memory is allocated.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, length: int, frequencies: "Frequencies") -> None:
        super().__init__()
        self.head_dim, self.length, self.frequencies = head_dim, length, frequencies
        self.register_buffer("cos", torch.empty(length, head_dim // 2), persistent=False)
        self.register_buffer("sin", torch.empty(length, head_dim // 2), persistent=False)

    @torch.no_grad()
    def reset(self) -> None:
        """Fill the cache, in fp64 on the CPU so that every device holds the same values."""
        positions = torch.arange(self.length, dtype=torch.float64)
        angles = torch.outer(positions, self.frequencies.inverse(self.head_dim))
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(
        self, seq: int, positions: Int[Tensor, "batch seq"] | None
    ) -> tuple[Float[Tensor, "batch_or_1 seq 1 half"], Float[Tensor, "batch_or_1 seq 1 half"]]:
        """Cosines and sines of the given positions, or of 0 .. seq - 1."""
        if positions is None:
            return self.cos[None, :seq, None], self.sin[None, :seq, None]
        return self.cos[positions][:, :, None], self.sin[positions][:, :, None]


class Frequencies:
    """Rotation per position of each pair, in radians: theta^(-2i / head_dim), with context scaling."""

    def __init__(
        self,
        theta: float,
        *,
        scaling: str = "none",
        factor: float = 1.0,
        low_freq_factor: float = 1.0,
        high_freq_factor: float = 4.0,
        original_context: int = 8192,
    ) -> None:
        self.theta, self.scaling, self.factor = theta, scaling, factor
        self.low, self.high, self.original_context = low_freq_factor, high_freq_factor, original_context

    def inverse(self, head_dim: int) -> Float[Tensor, " half"]:
        """Inverse frequencies of a head's pairs, fp64 on the CPU."""
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        plain = self.theta**-exponent
        return self._llama3(plain) if self.scaling == "llama3" else plain

    def _llama3(self, plain: Float[Tensor, " half"]) -> Float[Tensor, " half"]:
        """Slow long wavelengths down by `factor`, leave short ones, blend between (Llama 3.1 model card)."""
        turns = self.original_context * plain / (2 * math.pi)
        # 0 for wavelengths above original_context / low, 1 below original_context / high.
        blend = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return (1 - blend) * plain / self.factor + blend * plain


def rotate(
    heads: Float[Tensor, "batch seq heads head_dim"],
    cos: Float[Tensor, "batch_or_1 seq 1 half"],
    sin: Float[Tensor, "batch_or_1 seq 1 half"],
) -> Float[Tensor, "batch seq heads head_dim"]:
    """Rotate each pair by its position's angle, in fp32; returns the input dtype."""
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)
