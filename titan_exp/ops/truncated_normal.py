"""Counter-based truncated normal numbers: SplitMix64 of a counter, mapped by the inverse CDF, in eager tensor kernels.

The bits are the same on every device and in every torch version: integer arithmetic wraps, and floating point is a
sequence of single additions, multiplications and one division, each correctly rounded by a kernel of its own.
Logarithm, exponential, `erfinv` and fused multiply-add differ between libraries, so none is used.
"""

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

TRUNCATION = 3.0  # bound of the distribution in standard deviations

GAMMA = 0x9E3779B97F4A7C15  # increment of SplitMix64 per counter

_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Shift and multiplier of the first two mixing rounds; the third shifts by 31."""

# Minimax fit of z(t) / t over w = 1 - t², with z the inverse CDF at t in [-1, 1]: both monic, lowest degree first. All
# coefficients are positive, so nothing cancels. Largest error of z: 3.3e-6 in exact arithmetic.
_SCALE = 0.5287089470114475
_NUMERATOR = (4.2399495616006174e-05, 0.007833510909358394, 0.33290783753293507, 3.2881968181550634, 6.068275062393151)
_DENOMINATOR = (
    7.472339075195361e-06,
    0.001516881689538428,
    0.07469553594041506,
    0.9289339613354369,
    2.5195751150395242,
)


def wrap(value: int) -> int:
    """Value modulo 2⁶⁴ as a signed 64-bit integer, which tensor kernels take."""
    return (value + 2**63) % 2**64 - 2**63


def splitmix64(state: Int64[Tensor, "*any"]) -> Int64[Tensor, "*any"]:
    """Mix states `key + counter · GAMMA` into random words, in place (Steele, Lea, Flood 2014)."""
    shifted = torch.empty_like(state)
    for shift, multiplier in _MIX:
        _xor_shift(state, shifted, shift).mul_(wrap(multiplier))
    return _xor_shift(state, shifted, 31)


def _xor_shift(state: Tensor, shifted: Tensor, shift: int) -> Tensor:
    """state ^= state >>> shift; torch's own shift of signed integers copies the sign."""
    torch.bitwise_right_shift(state, shift, out=shifted)
    return state.bitwise_xor_(shifted.bitwise_and_(2 ** (64 - shift) - 1))


def truncated_normal(words: Int64[Tensor, "rows words"], std: float) -> Float32[Tensor, "rows two_words"]:
    """Normal numbers with standard deviation `std`, truncated at `TRUNCATION` standard deviations; each random word
    yields two."""
    t = words.view(torch.int32).float().mul_(2.0**-31)
    w = torch.mul(t, t).neg_().add_(1.0)
    value = _polynomial(w, _NUMERATOR).div_(_polynomial(w, _DENOMINATOR))
    return value.mul_(t).mul_(_SCALE * std)


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """Evaluate a monic polynomial by Horner's rule, with two roundings per degree."""
    *rest, highest = coefficients
    value = x + highest
    for coefficient in reversed(rest):
        value.mul_(x).add_(coefficient)
    return value
