"""Rotary position embedding in real arithmetic (Su et al. 2021) with the published context scalings, and temperatures.

Rotates the pairs (i, i + head_dim / 2) of a head, Hugging Face's layout; real-valued, so that it fuses.
"""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from titan_exp.ops.autograd import in_type

Heads = Float[Tensor, "batch seq heads head_dim"]
Keys = Float[Tensor, "batch seq kv_heads head_dim"]
Cos = Float[Tensor, "batch_or_1 seq 1 half"]
Sin = Float[Tensor, "batch_or_1 seq 1 2 half"]
Rope = tuple[Cos, Sin]
Pairs = Float[Tensor, " half"]
Positions = Int[Tensor, "batch seq"]


class RotaryEmbedding(nn.Module):
    """RoPE cache: cosines and sines by position, in fp32. A sine lies there with both signs, one for each of its pair.
    It is a non-persistent buffer that `reset` computes once its memory is allocated."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, length: int, frequencies: "Frequencies") -> None:
        super().__init__()
        self.head_dim, self.length, self.frequencies = head_dim, length, frequencies
        self.register_buffer("cos", torch.empty(length, head_dim // 2), persistent=False)
        self.register_buffer("sin", torch.empty(length, 2, head_dim // 2), persistent=False)

    @torch.no_grad()
    def reset(self) -> None:
        positions = torch.arange(self.length, dtype=torch.float64)
        angles, magnitude = torch.outer(positions, self.frequencies.inverse(self.head_dim)), self.frequencies.magnitude
        self.cos.copy_(angles.cos() * magnitude)
        self.sin.copy_(torch.stack((-angles.sin(), angles.sin()), dim=1) * magnitude)

    def forward(self, seq: int, positions: Positions | None) -> Rope:
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
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        truncate: bool = True,
        original_context: int = 8192,
        magnitude: float = 1.0,
    ) -> None:
        self.theta, self.scaling, self.factor = theta, scaling, factor
        self.low, self.high, self.original_context = low_freq_factor, high_freq_factor, original_context
        self.fast, self.slow, self.truncate = beta_fast, beta_slow, truncate
        self.magnitude = magnitude
        """Factor of cosines and sines."""

    def inverse(self, head_dim: int) -> Pairs:
        """Inverse frequencies of a head's pairs, fp64 on the CPU."""
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        plain = self.theta**-exponent
        if self.scaling == "yarn":
            return self._yarn(plain)
        if self.scaling == "linear":
            return plain / self.factor
        return self._llama3(plain) if self.scaling == "llama3" else plain

    def _llama3(self, plain: Pairs) -> Pairs:
        """Slow long wavelengths down by `factor`, leave short ones, blend between (Llama 3.1 model card)."""
        turns = self.original_context * plain / (2 * math.pi)
        # 0 for wavelengths above original_context / low, 1 below original_context / high. Equal bounds blend nothing.
        between = (turns - self.low) / (self.high - self.low) if self.high > self.low else (turns >= self.low).double()
        blend = between.clamp(0, 1)
        return (1 - blend) * plain / self.factor + blend * plain

    def _yarn(self, plain: Pairs) -> Pairs:
        """Divide slow pairs by `factor`, leave fast ones, blend linearly by pair between (Peng et al. 2023)."""
        pairs = plain.shape[0]

        def pair_of(turns: float) -> float:
            """Pair that turns this often in the original context, as a real number."""
            return pairs * math.log(self.original_context / (2 * math.pi * turns)) / math.log(self.theta)

        first, last = pair_of(self.fast), pair_of(self.slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        # The published rule widens an empty range.
        width = last - first or 0.001
        slow = ((torch.arange(pairs, dtype=torch.float64) - first) / width).clamp(0, 1)
        return slow * plain / self.factor + (1 - slow) * plain


def rotate(
    heads: Float[Tensor, "batch seq *heads head_dim"],
    cos: Float[Tensor, "batch_or_1 seq *ones half"],
    sin: Float[Tensor, "batch_or_1 seq *ones 2 half"],
) -> Float[Tensor, "batch seq *heads head_dim"]:
    """Rotate each pair by its position's angle, in fp32; returns the input dtype."""
    # Multiplied by sign and swapped rather than concatenated, which the compiler would not fuse. Without fusion, a roll
    # is faster than a flip; the compiler would read more for a roll that it differentiates.
    pairs = heads.float().unflatten(-1, (2, -1))
    flips = torch.compiler.is_compiling() and torch.is_grad_enabled()
    swapped = pairs.flip(-2) if flips else pairs.roll(1, -2)
    rotated = pairs * cos.unsqueeze(-2) + swapped * sin
    return in_type(rotated.flatten(-2), heads.dtype)


def rotate_tail(heads: Heads, cos: Cos, sin: Sin) -> Heads:
    """Rotate the last 2 · half features of each head, and leave the features before them."""
    plain, tail = heads.split((heads.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]), dim=-1)
    return torch.cat((plain, rotate(tail, cos, sin)), dim=-1)


def rotate_front(heads: Heads, cos: Cos, sin: Sin) -> Heads:
    """Rotate the first 2 · half features of each head, and leave the features after them."""
    front, plain = heads.split((2 * cos.shape[-1], heads.shape[-1] - 2 * cos.shape[-1]), dim=-1)
    return torch.cat((rotate(front, cos, sin), plain), dim=-1)


def split_rotated(
    qkv: Float[Tensor, "batch seq kv_heads slots head_dim"], cos: Cos, sin: Sin
) -> tuple[Heads, Keys, Keys]:
    """Split a fused projection (per key-value head: queries, key, value) into rotated query heads, rotated keys, and
    values. Backward keeps nothing of `qkv`."""
    return _SplitRotated.apply(qkv, cos, sin)  # type: ignore[return-value]  # tensors


class _SplitRotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        # Queries and keys together are half as many kernels. A view of a value would keep all of `qkv`.
        rotated = rotate(qkv[..., :-1, :], cos[:, :, None], sin[:, :, None])
        key, value = (
            heads.clone(memory_format=torch.contiguous_format) for heads in (rotated[..., -1, :], qkv[..., -1, :])
        )
        return rotated[..., :-1, :].flatten(2, 3), key, value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        query, key, value = gradients
        both = torch.cat((query.unflatten(2, (key.shape[2], -1)), key[:, :, :, None]), dim=3)
        rotated = rotate(both, cos[:, :, None], -sin[:, :, None])
        return torch.cat((rotated, value[:, :, :, None]), dim=3), None, None


class TemperatureTable(nn.Module):
    """Query temperature by position, which keeps long sequences' softmax sharp (Llama 4): factors of queries 1 +
    coefficient · ln(1 + floor((position + 1) / floor_scale)), in fp32. It is a non-persistent buffer that `reset`
    computes once its memory is allocated."""

    factors: Tensor

    def __init__(self, length: int, coefficient: float, floor_scale: int) -> None:
        super().__init__()
        self.length, self.coefficient, self.floor_scale = length, coefficient, floor_scale
        self.register_buffer("factors", torch.empty(length), persistent=False)

    @torch.no_grad()
    def reset(self) -> None:
        steps = (torch.arange(self.length) + 1) // self.floor_scale
        self.factors.copy_(1 + self.coefficient * steps.double().log1p())

    def forward(self, seq: int, positions: Positions | None) -> Float[Tensor, "batch_or_1 seq 1 1"]:
        found = self.factors[None, :seq] if positions is None else self.factors[positions]
        return found[..., None, None]
