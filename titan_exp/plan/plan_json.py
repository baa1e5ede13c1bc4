"""What was predicted of a run, as plain numbers: what crosses processes, is remembered, and is written down.

Imports no torch, so that commands that only read a prediction answer at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class RankPrediction:
    """What was predicted of a pipeline rank; the ranks that differ from it in other axes alone have the same."""

    pipeline_rank: int
    """Its number along pp."""
    allocated: int
    """Bytes of tensors at the peak."""
    reserved: int | None
    """Bytes that the allocator has of the device at most; None where that is not predicted, and on a CPU."""
    by_category: Mapping[str, int]
    """Of `allocated`, bytes by what they are for."""
    during: str
    """When the peak is, in words."""
    seconds: Mapping[str, float] | None
    """Of a step, by what bounds it (`RankTime`); None where no speed is known."""
    operators: int
    """Operators of a step."""

    @property
    def peak(self) -> int:
        """Bytes that the device must have: reserved ones where they are known."""
        return self.reserved or self.allocated


@dataclass(frozen=True)
class Prediction:
    """What was predicted of a run."""

    ranks: tuple[RankPrediction, ...]
    """Of every pipeline rank."""
    bubble: float
    """Share of the time in which ranks of the pipeline wait for each other."""
    step_seconds: float | None
    """Of a step; None where no speed is known."""
    tokens_per_second_per_device: float | None
    """Of one device; None likewise."""
    mfu: float | None
    """Model FLOPs over the bf16 peak; None likewise, and on a CPU."""

    @property
    def largest(self) -> RankPrediction:
        """The rank whose peak is the highest."""
        return max(self.ranks, key=lambda rank: rank.peak)


@dataclass(frozen=True)
class NotPredicted:
    """A run of which nothing was predicted."""

    reason: str
    """Why, in words."""


def joined(parts: Sequence[Mapping[str, Any]]) -> Prediction:
    """A prediction from plans of its pipeline ranks, each as `plan.report.as_json` has it; the slowest has the word."""
    slowest = max(parts, key=lambda part: part["step_seconds"] or 0.0)
    ranks = sorted((_rank(rank) for part in parts for rank in part["ranks"]), key=lambda rank: rank.pipeline_rank)
    return Prediction(
        tuple(ranks),
        slowest["bubble"],
        slowest["step_seconds"],
        slowest["tokens_per_second_per_device"],
        slowest["mfu"],
    )


def to_json(prediction: Prediction) -> dict[str, Any]:
    """A prediction as JSON values, which `from_json` reads back equal."""
    return asdict(prediction)


def from_json(values: Mapping[str, Any]) -> Prediction:
    """What `to_json` wrote.

    Raises:
        TypeError, KeyError: it was something else.
    """
    return Prediction(**{**values, "ranks": tuple(RankPrediction(**rank) for rank in values["ranks"])})


def _rank(found: Mapping[str, Any]) -> RankPrediction:
    return RankPrediction(
        found["pipeline_rank"],
        found["peak_allocated_bytes"],
        found.get("peak_reserved_bytes"),
        found["peak_by_category"],
        found["peak_during"],
        found["seconds"],
        found["operators"],
    )
