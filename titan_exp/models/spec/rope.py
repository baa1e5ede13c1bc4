"""Rotary position embedding (Su et al. 2021): base frequency, context scaling, and the context that it reaches."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.experiment import Change, ModelConfig
from titan_exp.config.groups.types import NonNegativeFloat, PositiveFloat, PositiveInt

ROPE = "model.rope"
"""Key of the embedding in the configuration."""

RopeScaling = Literal["none", "linear", "llama3", "yarn", "yarn_if_longer"]

_YARN = ("factor", "original_context", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
READ_BY = {
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_context"),
    "yarn": _YARN,
    "yarn_if_longer": _YARN,
}
"""Keys that a scaling reads, beside `theta`."""


def _change(rope: Any, _: str) -> Change:
    """Kind of a change to given weights: declaring a scaling may be meant, since it stretches their context; dropping
    theirs is not."""
    return Change.FUNCTION if rope.scaling == "none" else Change.MEANT


STRETCHES = {"change": _change}
"""Metadata of the keys of a scaling."""


@dataclass(frozen=True)
class PlainRope:
    """Rotary position embedding without context scaling."""

    theta: PositiveFloat
    """Base of the geometric series of wavelengths. E.g. `model.rope.theta=1e6`."""

    def resolved(self, context: int) -> "PlainRope":
        """Return the embedding with values resolved for a model of this context."""
        return self

    def effective(self, context: int) -> "PlainRope":
        """Return the resolved embedding, with all keys that it does not read at their defaults."""
        return self

    def longest(self, context: int) -> int:
        """Longest sequence in tokens of a model of this context."""
        return context

    @property
    def rotates(self) -> bool:
        """False if queries and keys know no positions."""
        return True

    @property
    def score_factor(self) -> float:
        """Factor of the scores of latent attention."""
        return 1.0

    @property
    def frequencies(self) -> dict[str, Any]:
        """Arguments of `ops.attention.rope.Frequencies`."""
        return {"theta": self.theta}


@dataclass(frozen=True)
class OptionalRope(PlainRope):
    """Rotary position embedding of a model that is published without."""

    theta: PositiveFloat | None  # type: ignore[assignment]  # wider than in other families
    """Base of the geometric series of wavelengths; null is no rotary embedding, so that only linear attention knows the
    order of tokens. E.g. `model=olmo_hybrid_debug model.rope.theta=1e4`."""

    @property
    def rotates(self) -> bool:
        return self.theta is not None


@dataclass(frozen=True)
class ScaledRope(PlainRope):
    """Rotary position embedding with a context scaling."""

    scaling: RopeScaling = field(default="none", metadata=STRETCHES)
    """Scaling of RoPE, which stretches the context: `none`, or `linear` (slows every pair down), `llama3` (slows long
    wavelengths down, as Llama 3.1 and 3.2 do), or `yarn` (slows slow pairs down, Peng et al. 2023). `yarn_if_longer` is
    yarn if the model's context is longer than `original_context`, and else none.

    `yarn` is computed as in `transformers`, `yarn_if_longer` as in DeepSeek's own code.
    E.g. `model.rope.scaling=yarn model.rope.factor=4`."""
    factor: PositiveFloat = field(default=1.0, metadata=STRETCHES)
    """Factor by which the context is stretched: 8 in Llama 3.1, 32 in Llama 3.2 and GPT-OSS, and 40 in DeepSeek.
    E.g. `model.rope.scaling=linear model.rope.factor=2`."""
    low_freq_factor: PositiveFloat = field(default=1.0, metadata=STRETCHES)
    """Low-frequency factor of `llama3`: it stretches wavelengths longer than `original_context / low_freq_factor` by
    the whole factor. E.g. `model.rope.low_freq_factor=1`."""
    high_freq_factor: PositiveFloat = field(default=4.0, metadata=STRETCHES)
    """High-frequency factor of `llama3`: it leaves wavelengths shorter than `original_context / high_freq_factor` as
    they are. E.g. `model.rope.high_freq_factor=4`."""
    original_context: PositiveInt | None = field(default=None, metadata=STRETCHES)
    """Context length in tokens before scaling; null takes `model.context`. E.g. `model.rope.original_context=8192`."""
    beta_fast: PositiveFloat = field(default=32.0, metadata=STRETCHES)
    """Upper end of the blend of `yarn`, in turns: pairs that turn more often in the original context stay as they are.
    E.g. `model.rope.beta_fast=16`."""
    beta_slow: PositiveFloat = field(default=1.0, metadata=STRETCHES)
    """Lower end of the blend of `yarn`, in turns: pairs that turn less often in the original context are slowed down by
    the whole factor. E.g. `model.rope.beta_slow=2`."""
    mscale: NonNegativeFloat = field(default=1.0, metadata=STRETCHES)
    """Coefficient m of `yarn` in the factor 0.1 · m · ln(factor) + 1, by which cosines and sines are multiplied.
    E.g. `model.rope.mscale=0.707`."""
    mscale_all_dim: NonNegativeFloat = field(default=0.0, metadata=STRETCHES)
    """Coefficient m of `yarn` for all features of a head: cosines and sines are divided by the same factor, and the
    scores of latent attention are multiplied by its square. E.g. `model.rope.mscale_all_dim=0.707`."""
    truncate: bool = field(default=True, metadata=STRETCHES)
    """True if `yarn` rounds the first and the last blended pair outwards. GPT-OSS has false.
    E.g. `model.rope.truncate=false`."""

    def resolved(self, context: int) -> "ScaledRope":
        original = self.original_context or context
        if self.scaling != "yarn_if_longer":
            return replace(self, original_context=original)
        return replace(self, original_context=original, scaling="yarn" if context > original else "none")

    def effective(self, context: int) -> "ScaledRope":
        rope = self.resolved(context)
        unread = {one.name: one.default for one in fields(ScaledRope) if one.name not in READ_BY[rope.scaling]}
        return replace(rope, **unread | {"theta": rope.theta, "scaling": rope.scaling})

    def longest(self, context: int) -> int:
        """Longest sequence in tokens of a model of this context: the length that its scaling reaches, if that is more.
        Published models with `llama3` state a context that is not the product."""
        rope = self.resolved(context)
        assert rope.original_context is not None, "resolved"
        if rope.scaling == "none" or (rope.scaling == "llama3" and context > rope.original_context):
            return context
        return max(context, int(rope.original_context * rope.factor))

    @property
    def magnitude(self) -> float:
        """Factor of cosines and sines."""
        if self.scaling != "yarn":
            return 1.0
        return magnitude(self.factor, self.mscale) / magnitude(self.factor, self.mscale_all_dim)

    @property
    def score_factor(self) -> float:
        return magnitude(self.factor, self.mscale_all_dim) ** 2 if self.scaling == "yarn" else 1.0

    @property
    def frequencies(self) -> dict[str, Any]:
        assert self.scaling != "yarn_if_longer", "resolved by the family's spec"
        given = {key: value for key, value in vars(self).items() if key not in ("mscale", "mscale_all_dim")}
        return {**given, "magnitude": self.magnitude}


@dataclass(frozen=True)
class RopeConfig(ScaledRope):
    """Rotary position embedding of Llama."""

    in_run_id = ("scaling", "factor", "low_freq_factor", "high_freq_factor", "original_context")
    """Keys that belong to a run's id even at their defaults, as in older versions."""


@dataclass(frozen=True)
class YarnRope(ScaledRope):
    """Rotary position embedding of DeepSeek and GPT-OSS."""

    in_run_id = (
        *("scaling", "factor", "original_context"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    )
    """Keys that belong to a run's id even at their defaults, as in older versions."""


def rope_violations(rope: PlainRope) -> Iterator[Violation]:
    """Violations by undefined context scalings, and by factors without a scaling."""
    if not isinstance(rope, ScaledRope):
        return
    if rope.scaling == "none" and rope.factor != 1:
        reason = "it changes nothing while model.rope.scaling is none"
        remedy = "use model.rope.scaling=llama3 (or linear, yarn), or model.rope.factor=1"
        yield Violation("model.rope.factor", rope.factor, reason, remedy)
    if rope.scaling != "none" and rope.factor < 1:
        reason = "a scaling can only stretch the context"
        yield Violation("model.rope.factor", rope.factor, reason, "use model.rope.factor=1 or more")
    if rope.scaling == "llama3" and rope.low_freq_factor > rope.high_freq_factor:
        reason = f"it must not exceed model.rope.high_freq_factor, {rope.high_freq_factor:g}"
        remedy = "use the values of Llama 3.1: model.rope.low_freq_factor=1 model.rope.high_freq_factor=4"
        yield Violation("model.rope.low_freq_factor", rope.low_freq_factor, reason, remedy)
    if rope.scaling.startswith("yarn") and rope.beta_fast < rope.beta_slow:
        reason = f"it must be at least model.rope.beta_slow, {rope.beta_slow:g}"
        remedy = "use the values of published models: model.rope.beta_fast=32 model.rope.beta_slow=1"
        yield Violation("model.rope.beta_fast", rope.beta_fast, reason, remedy)


def magnitude(factor: float, mscale: float) -> float:
    """YaRN's factor of cosines and sines, from its coefficient."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def longest_sequence(model: ModelConfig) -> int:
    """Longest sequence in tokens: the context, or the length that RoPE's scaling reaches, if that is more."""
    rope = getattr(model, "rope", None)
    return rope.longest(model.context) if isinstance(rope, PlainRope) else model.context


def exceeds_context(model: ModelConfig, seq_len: int) -> Iterator[Violation]:
    """Violation by a sequence longer than the model's context, with the scalings that reach it."""
    rope, longest = getattr(model, "rope", None), longest_sequence(model)
    if seq_len <= longest:
        return
    reason = f"the context of {model.name} is {longest} tokens"
    stretched = f"model.context={seq_len}"
    if isinstance(rope, ScaledRope):
        resolved = rope.resolved(model.context)
        assert resolved.original_context is not None, "resolved"
        if resolved.scaling == "none":
            factor = -(-seq_len // resolved.original_context)
            scaling = f"{ROPE}.scaling=yarn {ROPE}.factor={factor} (or linear, llama3)"
        else:
            reason += f" with {ROPE}.scaling={rope.scaling} {ROPE}.factor={rope.factor:g}"
            scaling = f"{ROPE}.factor={rope.factor * -(-seq_len // longest):g}"
            scaling += f" {stretched}" if resolved.scaling == "llama3" else ""
        stretched = f"{scaling}, which stretches the context, or {stretched} for new weights or weights of that context"
    yield Violation("training.seq_len", seq_len, reason, f"use training.seq_len={longest} or less, or {stretched}")
