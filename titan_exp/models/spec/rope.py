"""Configuration of rotary position embedding (Su et al. 2021): base frequency, and context scaling."""

from dataclasses import dataclass
from typing import Literal

from titan_exp.config.groups.types import PositiveFloat, PositiveInt


@dataclass(frozen=True)
class PlainRope:
    """Rotary position embedding without context scaling."""

    theta: PositiveFloat
    """Base of the geometric series of wavelengths."""


@dataclass(frozen=True)
class RopeConfig(PlainRope):
    """Rotary position embedding with the context scaling of Llama 3.1."""

    scaling: Literal["none", "llama3"]
    """`llama3` slows long wavelengths down as Llama 3.1 and 3.2 do."""
    factor: PositiveFloat
    """Scaling factor of the context (8 in Llama 3.1, 32 in Llama 3.2)."""
    low_freq_factor: PositiveFloat
    """Wavelengths longer than `original_context / low_freq_factor` are stretched by the whole factor."""
    high_freq_factor: PositiveFloat
    """Wavelengths shorter than `original_context / high_freq_factor` are left alone."""
    original_context: PositiveInt
    """Context in tokens before scaling."""
