"""Whether a run fits where it would be: by an upper bound where that decides, else by planning it. Imports no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.machine.devices import device_type
from titan_exp.plan.calibrated_constants import FITTED
from titan_exp.plan.device_memory import Target, target_of
from titan_exp.plan.gate.batch_predict import Question, foretell
from titan_exp.plan.gate.upper_bound import upper_bound
from titan_exp.plan.plan_json import Prediction, RankPrediction, Unpredicted, to_json

GIB = 2**30


@dataclass(frozen=True)
class Judgement:
    """What is known of a run's memory before it starts."""

    experiment: Experiment
    """The run, its layout resolved."""
    target: Target | None
    """Where it would be; None where nobody looked."""
    bound: int | None = None
    """Bytes that each of its processes stays below; None where that was not asked."""
    prediction: Prediction | None = None
    """What was predicted, where that was needed or asked for."""
    why_not: str = ""
    """Why nothing is known, in words; empty where something is."""

    @property
    def needed(self) -> int | None:
        """Bytes that the processes that share a memory need together; None where nothing is predicted."""
        return None if self.prediction is None or self.target is None else needed(self.experiment, self)

    @property
    def fits(self) -> bool | None:
        """Whether the run fits; None where that is not known."""
        if self.target is None or self.target.capacity is None:
            return None
        if self.needed is not None:
            return self.needed <= self.target.capacity
        return True if self.bound is not None else None


def judge(
    experiments: Sequence[Experiment], runs: Path, say: Callable[[str], None] = lambda _: None
) -> list[Judgement]:
    """What is known of each run's memory, in their order.

    Args:
        experiments: the runs, their layouts resolved.
        runs: `paths.runs`, under whose `.cache` predictions and measured rates are kept.
        say: takes a line before what takes seconds.
    """
    found = [_at_once(experiment, runs) for experiment in experiments]
    asked = [number for number, judgement in enumerate(found) if _is_open(judgement)]
    questions = [Question(found[number].experiment, _device(found[number])) for number in asked]
    for number, answer in zip(asked, foretell(questions, runs / ".cache", say), strict=True):
        before = found[number]
        if isinstance(answer, Unpredicted):
            found[number] = Judgement(before.experiment, before.target, before.bound, None, answer.reason)
        else:
            found[number] = Judgement(before.experiment, before.target, before.bound, answer, before.why_not)
    return found


def needed(experiment: Experiment, judgement: Judgement) -> int:
    """Bytes that the processes that share a memory need together."""
    prediction, target = judgement.prediction, judgement.target
    assert prediction is not None, "nothing is predicted"
    assert target is not None, "nobody looked"
    if target.sharing < ResolvedLayout.of(experiment).world_size or target.sharing == 1:
        # Which ranks come together is the scheduler's affair: none of them needs more than the largest.
        return target.sharing * (prediction.largest.peak + target.overhead)
    copies = target.sharing // len(prediction.ranks)
    return sum(copies * (rank.peak + target.overhead) for rank in prediction.ranks)


def refusal(judgement: Judgement) -> str:
    """Why a run does not fit: which pipeline rank, how much, and of what it is made."""
    prediction, target = judgement.prediction, judgement.target
    assert prediction is not None, "nothing is predicted"
    assert target is not None, "nobody looked"
    largest = prediction.largest
    who = f"pipeline rank {largest.pipeline_rank} of {len(prediction.ranks)}" if len(prediction.ranks) > 1 else "a rank"
    rank = f"{who} needs {gib(largest.peak + target.overhead)} at its peak ({largest.during})"
    has = f"{target.name} has {gib(target.capacity or 0)}"
    if target.sharing > 1:
        rank += f", the {target.sharing} that share its memory {gib(judgement.needed or 0)}"
    return f"{rank}; {has}.\n  {composition(largest, target.overhead)}"


def composition(rank: RankPrediction, overhead: int) -> str:
    """What a rank's peak is made of, the largest first."""
    parts = sorted(((size, name) for name, size in rank.by_category.items()), reverse=True)
    if rank.reserved is not None:
        parts.append((rank.reserved - rank.allocated, "what the allocator keeps beyond them"))
    if overhead:
        parts.append((overhead, "the process beside them"))
    return "It is made of: " + ", ".join(f"{name} {gib(size)}" for size, name in parts if size >= GIB / 200)


def record(judgement: Judgement) -> dict[str, Any] | None:
    """What plan.json says of a run; None where nobody looked."""
    target, prediction = judgement.target, judgement.prediction
    if target is None:
        return None
    found: dict[str, Any] = {
        "device": target.device.name if target.device else target.name,
        "capacity_bytes": target.capacity,
        "processes_that_share_it": target.sharing,
        "fits": judgement.fits,
        "bound_bytes": judgement.bound,
        "why_not_predicted": judgement.why_not or None,
    }
    if prediction is None:
        return found
    world = ResolvedLayout.of(judgement.experiment).world_size
    speed = prediction.tokens_per_second_per_device
    return {
        **found,
        "needed_bytes": judgement.needed,
        "overhead_bytes": target.overhead,
        # As metrics.jsonl has them: of rank 0, and of the whole job.
        "memory": expected_memory(judgement) / GIB,
        "tokens_per_second": None if speed is None else speed * world,
        "constants": None if target.device is None else {name: getattr(target.device, name) for name in FITTED},
        **to_json(prediction),
    }


def expected_memory(judgement: Judgement) -> int:
    """What `memory` of metrics.jsonl should say, in bytes: on a GPU allocated tensors, on a CPU the process."""
    assert judgement.prediction is not None, "nothing is predicted"
    assert judgement.target is not None, "nobody looked"
    overhead = 0 if device_type(judgement.experiment.cluster) == "cuda" else judgement.target.overhead
    return judgement.prediction.ranks[0].allocated + overhead


def gib(size: float) -> str:
    """Bytes for reading."""
    return f"{size / GIB:.1f} GiB" if size >= 10 * GIB else f"{size / GIB:.2f} GiB"


def _at_once(experiment: Experiment, runs: Path) -> Judgement:
    """What can be said without planning anything."""
    if experiment.plan.gate == "off":
        return Judgement(experiment, None, why_not="plan.gate=off")
    target = target_of(experiment, runs)
    if target.capacity is None:
        return Judgement(experiment, target, why_not=target.unknown)
    bound = upper_bound(experiment)
    fits = bound is not None and bound * target.sharing <= target.capacity
    return Judgement(experiment, target, bound if fits else None)


def _is_open(judgement: Judgement) -> bool:
    if judgement.target is None:
        return False
    if judgement.experiment.plan.predict == "always":
        return True
    return judgement.target.capacity is not None and judgement.bound is None


def _device(judgement: Judgement) -> Any:
    return None if judgement.target is None else judgement.target.device
