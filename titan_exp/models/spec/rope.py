"""Configuration of rotary position embedding (Su et al. 2021): base frequency, and context scaling."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.types import NonNegativeFloat, PositiveFloat, PositiveInt


@dataclass(frozen=True)
class PlainRope:
    """Rotary position embedding without context scaling."""

    theta: PositiveFloat
    """Base of the geometric series of wavelengths."""

    def resolved(self, context: int) -> "PlainRope":
        """The same embedding for a model of this context."""
        return self

    @property
    def frequencies(self) -> dict[str, Any]:
        """Arguments of `ops.attention.rope.Frequencies`."""
        return dict(vars(self))


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


def rope_violations(rope: RopeConfig) -> Iterator[Violation]:
    """Context scalings that Llama 3.1 does not define, and factors without one."""
    if rope.scaling == "none" and rope.factor != 1:
        yield Violation(
            "model.rope.factor",
            rope.factor,
            "without a scaling it changes nothing",
            "choose the scaling (model.rope.scaling=llama3), or model.rope.factor=1",
        )
    if rope.scaling == "llama3" and rope.low_freq_factor > rope.high_freq_factor:
        yield Violation(
            "model.rope.low_freq_factor",
            rope.low_freq_factor,
            f"it must not exceed model.rope.high_freq_factor, {rope.high_freq_factor:g}",
            "Llama 3.1 has model.rope.low_freq_factor=1 and model.rope.high_freq_factor=4",
        )


@dataclass(frozen=True)
class YarnRope(PlainRope):
    """Rotary position embedding with YaRN (Peng et al. 2023): context scaling, and colder attention."""

    scaling: Literal["none", "yarn", "yarn_if_longer"]
    """`yarn` scales always, as `transformers` does; `yarn_if_longer` only if the model's context is longer than
    `original_context`, as DeepSeek's own code does: the two differ for a model of the original context."""
    factor: PositiveFloat
    """Factor by which the context is extended (40 in DeepSeek, 32 in GPT-OSS)."""
    beta_fast: PositiveFloat
    """Pairs that turn more often than this in the original context are left alone."""
    beta_slow: PositiveFloat
    """Pairs that turn less often than this in the original context are slowed down by the whole factor."""
    mscale: NonNegativeFloat
    """Coefficient m in the factor 0.1 · m · ln(factor) + 1 of cosines and sines."""
    mscale_all_dim: NonNegativeFloat
    """The same coefficient for all features of a head: cosines and sines are divided by its factor, and the scores of
    latent attention multiplied by its square."""
    truncate: bool
    """Round the first and the last blended pair outwards; false in GPT-OSS."""
    original_context: PositiveInt
    """Context in tokens before scaling."""

    def resolved(self, context: int) -> "YarnRope":
        """The same embedding for a model of this context, its scaling either `none` or `yarn`."""
        if self.scaling != "yarn_if_longer":
            return self
        return replace(self, scaling="yarn" if context > self.original_context else "none")

    @property
    def score_factor(self) -> float:
        """Factor of the scores of latent attention."""
        return _magnitude(self.factor, self.mscale_all_dim) ** 2 if self.scaling == "yarn" else 1.0

    @property
    def frequencies(self) -> dict[str, Any]:
        """Arguments of `ops.attention.rope.Frequencies`."""
        assert self.scaling != "yarn_if_longer", "resolved by the family's spec"
        given = {key: value for key, value in vars(self).items() if key not in ("mscale", "mscale_all_dim")}
        magnitude = _magnitude(self.factor, self.mscale) / _magnitude(self.factor, self.mscale_all_dim)
        return {**given, "magnitude": magnitude if self.scaling == "yarn" else 1.0}


def yarn_violations(rope: YarnRope) -> Iterator[Violation]:
    """Context scalings that YaRN does not define."""
    if rope.beta_fast < rope.beta_slow:
        yield Violation(
            "model.rope.beta_fast",
            rope.beta_fast,
            f"it must be at least model.rope.beta_slow, {rope.beta_slow:g}",
            "published models have model.rope.beta_fast=32 and model.rope.beta_slow=1",
        )
    if rope.scaling == "none" and rope.factor != 1:
        yield Violation(
            "model.rope.factor",
            rope.factor,
            "without a scaling it changes nothing",
            "choose the scaling (model.rope.scaling=yarn), or model.rope.factor=1",
        )


def _magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0
