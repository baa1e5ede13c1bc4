"""Predictions as plain values, which cross processes, are cached and are written to plan.json.

Imports no torch, so that commands that only read a prediction answer at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class RankPrediction:
    """Prediction of one pipeline rank, which is the same for every rank of its stage."""

    pipeline_rank: int
    """Rank along pp."""
    allocated: int
    """Peak of allocated tensors in bytes."""
    reserved: int | None
    """Peak that the caching allocator reserves, in bytes; None on a CPU and where it is not predicted."""
    by_category: Mapping[str, int]
    """Breakdown of `allocated`."""
    during: str
    """Phase of the peak, as `forward, block 3`."""
    seconds: Mapping[str, float] | None
    """Step time by what bounds it (`RankTime`); None without known rates."""
    operators: int
    """Operators of a step."""

    @property
    def peak(self) -> int:
        """Bytes that the device must have: reserved ones where they are known."""
        return self.reserved or self.allocated


@dataclass(frozen=True)
class Prediction:
    """Prediction of a run."""

    ranks: tuple[RankPrediction, ...]
    """Every pipeline rank."""
    bubble: float
    """Pipeline bubble as a share of the step."""
    step_seconds: float | None
    """Step time; None without known rates."""
    tokens_per_second_per_device: float | None
    """Throughput of one device; None without known rates."""
    mfu: float | None
    """Model FLOPs over the bf16 peak; None on a CPU and without known rates."""

    @property
    def largest(self) -> RankPrediction:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak)


@dataclass(frozen=True)
class NotPredicted:
    """A run that could not be predicted."""

    reason: str
    """Reason, as a clause."""


def merge_ranks(parts: Sequence[Mapping[str, Any]]) -> Prediction:
    """Merge plans of pipeline ranks, each in the form of `plan_table.plan_to_json`; the slowest sets the speed."""
    slowest = max(parts, key=lambda part: part["step_seconds"] or 0.0)
    ranks = sorted((_rank(rank) for part in parts for rank in part["ranks"]), key=lambda rank: rank.pipeline_rank)
    speed = (slowest[name] for name in ("bubble", "step_seconds", "tokens_per_second_per_device", "mfu"))
    return Prediction(tuple(ranks), *speed)


def to_json(prediction: Prediction) -> dict[str, Any]:
    """A prediction as JSON values; `from_json` reads them back equal."""
    return asdict(prediction)


def from_json(values: Mapping[str, Any]) -> Prediction:
    """Inverse of `to_json`.

    Raises:
        TypeError, KeyError: the values are something else.
    """
    return Prediction(**{**values, "ranks": tuple(RankPrediction(**rank) for rank in values["ranks"])})


def _rank(values: Mapping[str, Any]) -> RankPrediction:
    return RankPrediction(
        values["pipeline_rank"],
        values["peak_allocated_bytes"],
        values.get("peak_reserved_bytes"),
        values["peak_by_category"],
        values["peak_during"],
        values["seconds"],
        values["operators"],
    )
