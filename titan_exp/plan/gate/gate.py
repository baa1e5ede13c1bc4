"""Whether a run fits where it would be: by an upper bound where that decides, else by planning it. Imports no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.machine.devices import device_type
from titan_exp.plan.calibrated_constants import FITTED
from titan_exp.plan.device_memory import DeviceMemory, device_memory_of
from titan_exp.plan.gate.batch_predict import PredictionRequest, predict_many
from titan_exp.plan.gate.upper_bound import upper_bound
from titan_exp.plan.plan_json import NotPredicted, Prediction, RankPrediction, to_json

GIB = 2**30


@dataclass(frozen=True)
class MemoryCheck:
    """What is known of a run's memory before it starts."""

    experiment: Experiment
    """The run, its layout resolved."""
    device_memory: DeviceMemory | None
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
        return None if self.prediction is None or self.device_memory is None else needed(self.experiment, self)

    @property
    def fits(self) -> bool | None:
        """Whether the run fits; None where that is not known."""
        if self.device_memory is None or self.device_memory.capacity is None:
            return None
        if self.needed is not None:
            return self.needed <= self.device_memory.capacity
        return True if self.bound is not None else None


def check_memory(
    experiments: Sequence[Experiment], runs: Path, say: Callable[[str], None] = lambda _: None
) -> list[MemoryCheck]:
    """What is known of each run's memory, in their order.

    Args:
        experiments: the runs, their layouts resolved.
        runs: `paths.runs`, under whose `.cache` predictions and measured rates are kept.
        say: takes a line before what takes seconds.
    """
    found = [_at_once(experiment, runs) for experiment in experiments]
    asked = [number for number, memory_check in enumerate(found) if _is_open(memory_check)]
    questions = [PredictionRequest(found[number].experiment, _device(found[number])) for number in asked]
    for number, answer in zip(asked, predict_many(questions, runs / ".cache", say), strict=True):
        before = found[number]
        if isinstance(answer, NotPredicted):
            found[number] = MemoryCheck(before.experiment, before.device_memory, before.bound, None, answer.reason)
        else:
            found[number] = MemoryCheck(before.experiment, before.device_memory, before.bound, answer, before.why_not)
    return found


def needed(experiment: Experiment, memory_check: MemoryCheck) -> int:
    """Bytes that the processes that share a memory need together."""
    prediction, device_memory = memory_check.prediction, memory_check.device_memory
    assert prediction is not None, "nothing is predicted"
    assert device_memory is not None, "nobody looked"
    if device_memory.sharing < ResolvedLayout.of(experiment).world_size or device_memory.sharing == 1:
        # Which ranks come together is the scheduler's affair: none of them needs more than the largest.
        return device_memory.sharing * (prediction.largest.peak + device_memory.overhead)
    copies = device_memory.sharing // len(prediction.ranks)
    return sum(copies * (rank.peak + device_memory.overhead) for rank in prediction.ranks)


def explain_oom(memory_check: MemoryCheck) -> str:
    """Why a run does not fit: which pipeline rank, how much, and of what it is made."""
    prediction, device_memory = memory_check.prediction, memory_check.device_memory
    assert prediction is not None, "nothing is predicted"
    assert device_memory is not None, "nobody looked"
    largest = prediction.largest
    who = f"pipeline rank {largest.pipeline_rank} of {len(prediction.ranks)}" if len(prediction.ranks) > 1 else "a rank"
    rank = f"{who} needs {gib(largest.peak + device_memory.overhead)} at its peak ({largest.during})"
    has = f"{device_memory.name} has {gib(device_memory.capacity or 0)}"
    if device_memory.sharing > 1:
        rank += f", the {device_memory.sharing} that share its memory {gib(memory_check.needed or 0)}"
    return f"{rank}; {has}.\n  {breakdown(largest, device_memory.overhead)}"


def breakdown(rank: RankPrediction, overhead: int) -> str:
    """What a rank's peak is made of, the largest first."""
    parts = sorted(((size, name) for name, size in rank.by_category.items()), reverse=True)
    if rank.reserved is not None:
        parts.append((rank.reserved - rank.allocated, "what the allocator keeps beyond them"))
    if overhead:
        parts.append((overhead, "the process beside them"))
    return "It is made of: " + ", ".join(f"{name} {gib(size)}" for size, name in parts if size >= GIB / 200)


def plan_record(memory_check: MemoryCheck) -> dict[str, Any] | None:
    """What plan.json says of a run; None where nobody looked."""
    device_memory, prediction = memory_check.device_memory, memory_check.prediction
    if device_memory is None:
        return None
    found: dict[str, Any] = {
        "device": device_memory.device.name if device_memory.device else device_memory.name,
        "capacity_bytes": device_memory.capacity,
        "processes_that_share_it": device_memory.sharing,
        "fits": memory_check.fits,
        "bound_bytes": memory_check.bound,
        "why_not_predicted": memory_check.why_not or None,
    }
    if prediction is None:
        return found
    world = ResolvedLayout.of(memory_check.experiment).world_size
    speed = prediction.tokens_per_second_per_device
    return {
        **found,
        "needed_bytes": memory_check.needed,
        "overhead_bytes": device_memory.overhead,
        # As metrics.jsonl has them: of rank 0, and of the whole job.
        "memory": predicted_memory(memory_check) / GIB,
        "tokens_per_second": None if speed is None else speed * world,
        "constants": None
        if device_memory.device is None
        else {name: getattr(device_memory.device, name) for name in FITTED},
        **to_json(prediction),
    }


def predicted_memory(memory_check: MemoryCheck) -> int:
    """What `memory` of metrics.jsonl should say, in bytes: on a GPU allocated tensors, on a CPU the process."""
    assert memory_check.prediction is not None, "nothing is predicted"
    assert memory_check.device_memory is not None, "nobody looked"
    overhead = 0 if device_type(memory_check.experiment.cluster) == "cuda" else memory_check.device_memory.overhead
    return memory_check.prediction.ranks[0].allocated + overhead


def gib(size: float) -> str:
    """Bytes for reading."""
    return f"{size / GIB:.1f} GiB" if size >= 10 * GIB else f"{size / GIB:.2f} GiB"


def _at_once(experiment: Experiment, runs: Path) -> MemoryCheck:
    """What can be said without planning anything."""
    if experiment.plan.gate == "off":
        return MemoryCheck(experiment, None, why_not="plan.gate=off")
    device_memory = device_memory_of(experiment, runs)
    if device_memory.capacity is None:
        return MemoryCheck(experiment, device_memory, why_not=device_memory.unknown)
    bound = upper_bound(experiment)
    fits = bound is not None and bound * device_memory.sharing <= device_memory.capacity
    return MemoryCheck(experiment, device_memory, bound if fits else None)


def _is_open(memory_check: MemoryCheck) -> bool:
    if memory_check.device_memory is None:
        return False
    if memory_check.experiment.plan.predict == "always":
        return True
    return memory_check.device_memory.capacity is not None and memory_check.bound is None


def _device(memory_check: MemoryCheck) -> Any:
    return None if memory_check.device_memory is None else memory_check.device_memory.device
