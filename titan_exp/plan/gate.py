"""Memory gate: compares a run's predicted memory with its device's capacity. Imports no torch.

An upper bound from shapes decides small runs; we predict the others.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from titan_exp.config.devices import device_type
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.foreign_code import import_paths
from titan_exp.models.spec.lookup import model_spec
from titan_exp.models.spec.mixers import CHUNK
from titan_exp.models.spec.model_spec import LayerSpec
from titan_exp.plan.caching_allocator import STEPS
from titan_exp.plan.devices import SAVE_PROCESS_GB, DeviceMemory, device_memory_of, symmetric_memory
from titan_exp.plan.evaluation import evaluations_of
from titan_exp.plan.layouts import with_values
from titan_exp.plan.prediction import NotPredicted, Prediction, RankPrediction, exchange_of
from titan_exp.plan.predictions import PredictionRequest, predict_many
from titan_exp.rules import check
from titan_exp.tracking.display import GIB, format_bytes

BYTES_PER_PARAMETER = 128
"""Bytes per parameter in the upper bound: 20 for weight, gradient and three elements of optimizer state; 28 for FSDP's
gathered and reduced copies; 20 for temporaries of the update and of clipping; 28 for the copies of an asynchronous
save; 32 as margin."""
BYTES_PER_STATE = 12  # bytes per further element of optimizer state: itself, its copy in a save, and a temporary
PROCESS_OVERHEAD = {"cpu": 2**30, "cuda": 4 * 2**30}
"""Non-tensor bytes: Python and torch on a CPU (a third to a half of it, measured); on CUDA the context, and the
workspaces and buffers of cuBLAS and NCCL."""


def upper_bound(experiment: Experiment) -> int | None:
    """Upper bound of any rank's process in bytes; None with your own model or optimizer."""
    spec = model_spec(experiment.model)
    state = experiment.optimizer.max_state
    if spec is None or state is None:
        return None
    layout, seq = ResolvedLayout.of(experiment), experiment.training.seq_len
    # With symmetric memory, every tensor of rows has room for the rows of all ranks.
    room = layout.parallelism.ep if layout.parallelism.symmetric_exchange else 1
    blocks = sum(_numbers_per_token(layer, seq, room) for layer in spec.blocks)
    ends = (6 * spec.vocab_size + 4 * spec.dim) * (1 + len(spec.mtp_layers))
    rows = layout.micro_batch_size if layout.parallelism.pp == 1 else layout.sequences_per_dp_rank
    # Recipes keep quantized copies in addition to their sources.
    recipe = 1 if experiment.quantization.recipe == "none" else 2
    # A CUDA graph keeps its memory in addition to an evaluation's.
    passes = 2 if experiment.compile.cuda_graphs else 1
    numbers = state + experiment.weight_average.enabled + exchange_of(experiment).most_numbers(state)
    per_parameter = BYTES_PER_PARAMETER + BYTES_PER_STATE * max(0, numbers - 3)
    tensors = int(per_parameter * spec.parameters) + passes * 4 * rows * seq * (blocks + ends)
    compiler = 2**30 if experiment.compile.enabled else 0
    beside = PROCESS_OVERHEAD[layout.device_type] + compiler + symmetric_memory(layout, spec)
    return recipe * tensors + beside


def _numbers_per_token(layer: LayerSpec, seq: int, room: int) -> int:
    """Upper bound of elements that a block keeps per token, gradients included: eight times each linear's output
    (rotated, cast, split), with `room` times the rows for experts, plus all attention scores, or for linear attention
    the scores within a chunk and the states between chunks."""
    rows = ((linear, room if linear.experts > 1 else 1) for linear in layer.linears)
    outputs = sum(linear.outputs * linear.active_experts * times for linear, times in rows)
    scores = 0 if layer.attention is None else 6 * layer.attention.heads * seq
    if (mixer := layer.linear_attention) is not None:
        state = mixer.key_dim * mixer.value_dim // CHUNK
        scores = 6 * mixer.value_heads * (CHUNK + state + 16 * mixer.key_dim * (mixer.decay == "channel"))
    return 8 * outputs + scores


@dataclass(frozen=True)
class MemoryCheck:
    """Memory check of a run before its launch."""

    experiment: Experiment
    device_memory: DeviceMemory | None  # memory of the device; None with plan.gate=off
    bound: int | None = None  # upper bound per process in bytes; None if it is too loose to decide
    prediction: Prediction | None = None
    why_not: str = ""  # reason why there is neither bound nor prediction; else empty
    user_error: str = ""  # failure of the run's user code, with its frames; else empty
    layout_error: str = ""  # refusal of a run whose layouts do not agree; else empty
    layout_notes: tuple[str, ...] = ()
    """Sentences about layouts that were not checked, and about documents that see each other."""

    @property
    def planned(self) -> tuple[Prediction, DeviceMemory]:
        """Prediction and device memory of a run that was planned; every refused run was."""
        assert self.prediction is not None, "an upper bound refuses nothing"
        assert self.device_memory is not None, "plan.gate=off refuses nothing"
        return self.prediction, self.device_memory

    def process_bytes(self, rank: RankPrediction) -> int:
        """Bytes of a rank's process in the memory that limits the run."""
        return rank.peak + self.planned[1].overhead + staged(self.experiment, rank)

    @property
    def needed(self) -> int | None:
        """Bytes of all processes that share one memory; None without a prediction."""
        memory, prediction = self.device_memory, self.prediction
        if prediction is None or memory is None:
            return None
        if memory.sharing < ResolvedLayout.of(self.experiment).world_size or memory.sharing == 1:
            # The scheduler places ranks on nodes: count every rank of a node as the largest.
            return memory.sharing * self.process_bytes(prediction.largest)
        copies = memory.sharing // len(prediction.ranks)
        return sum(copies * self.process_bytes(rank) for rank in prediction.ranks)

    @property
    def fits(self) -> bool | None:
        """True if the run fits; None if unknown."""
        if self.device_memory is None or self.device_memory.capacity is None:
            return None
        if self.needed is not None:
            return self.needed <= self.device_memory.capacity
        return None if self.bound is None else True


def staged(experiment: Experiment, rank: RankPrediction) -> int:
    """Bytes of the state's copy on a CPU while an asynchronous save is written."""
    if device_type(experiment.cluster) != "cpu" or not experiment.checkpoint.mode.startswith("async"):
        return 0
    return rank.saved + (round(SAVE_PROCESS_GB * 1e9) if experiment.checkpoint.mode == "async_process" else 0)


def check_memory(
    experiments: Sequence[Experiment], runs: Path, say: Callable[[str], None] = lambda _: None
) -> list[MemoryCheck]:
    """Check the memory of runs with resolved layouts, in order. `runs/.cache` holds predictions and measured rates;
    `say` is called with a line before slow work."""
    checks = [_check_by_bound(experiment, runs) for experiment in experiments]
    found = {number: request for number, check in enumerate(checks) if (request := _request(check)) is not None}
    for number, answer in zip(found, predict_many(list(found.values()), runs / ".cache", say), strict=True):
        known = checks[number]
        if isinstance(answer, Prediction):
            checks[number] = replace(known, prediction=answer)
        else:
            checks[number] = replace(known, why_not=known.why_not or answer.reason, user_error=answer.user_error)
    return checks


def explain_fit(memory_check: MemoryCheck) -> str:
    """Sentence about a run that fits: the memory that its processes need, and the rest."""
    prediction, memory = memory_check.planned
    needed, room = memory_check.needed or 0, memory.capacity or 0
    who = "its process needs" if memory.sharing == 1 else f"the {memory.sharing} ranks that share its memory need"
    text = f"Fits, with {format_bytes(room - needed)} of {memory.name}'s {format_bytes(room)} left: {who} "
    return f"{text}{format_bytes(needed)}. {breakdown(memory_check, prediction.largest)}"


def explain_retries(memory_check: MemoryCheck) -> str:
    """Clause about an allocator under pressure; empty if the device is never full."""
    prediction = memory_check.prediction
    retries = 0 if prediction is None else max(rank.retries for rank in prediction.ranks)
    times = f"{retries} times in {STEPS} steps"
    return f"with the allocator under pressure: it finds the device full {times}" if retries else ""


def explain_oom(memory_check: MemoryCheck) -> str:
    """Explain why a run does not fit: pipeline rank, peak and its breakdown."""
    prediction, memory = memory_check.planned
    largest = prediction.largest
    who = f"pipeline rank {largest.pipeline_rank} of {len(prediction.ranks)}" if len(prediction.ranks) > 1 else "a rank"
    text = f"{who} needs {format_bytes(memory_check.process_bytes(largest))} at its peak ({largest.during})"
    if memory.sharing > 1:
        text += f", and the {memory.sharing} ranks that share its memory {format_bytes(memory_check.needed or 0)}"
    return f"{text}, and {memory.name} has {format_bytes(memory.capacity or 0)}.\n  {breakdown(memory_check, largest)}"


def breakdown(memory_check: MemoryCheck, rank: RankPrediction) -> str:
    """Breakdown of a process's memory, largest category first."""
    parts = sorted(((size, name) for name, size in rank.by_category.items()), reverse=True)
    if rank.reserved is not None:
        parts.append((rank.reserved - rank.allocated, "reserved but not allocated"))
    parts.append((staged(memory_check.experiment, rank), "copy of the state while a checkpoint is written"))
    parts.append((memory_check.planned[1].overhead, "process overhead"))
    return f"Breakdown: {', '.join(f'{name} {format_bytes(size)}' for size, name in parts if size >= GIB / 200)}."


def plan_record(memory_check: MemoryCheck) -> dict[str, Any] | None:
    """Content of plan.json; None with plan.gate=off."""
    memory, prediction = memory_check.device_memory, memory_check.prediction
    if memory is None:
        return None
    record: dict[str, Any] = {
        "device": memory.device.name if memory.device else memory.name,
        "capacity_bytes": memory.capacity,
        "processes_that_share_it": memory.sharing,
        "fits": memory_check.fits,
        "bound_bytes": memory_check.bound,
        "why_not_predicted": memory_check.why_not or None,
    }
    if prediction is None:
        return record
    experiment, speed = memory_check.experiment, prediction.tokens_per_second_per_device
    # `memory` in metrics.jsonl is rank 0's: allocated tensors on a GPU, the whole process on a CPU.
    process = memory.overhead + staged(experiment, prediction.ranks[0])
    return {
        **record,
        "needed_bytes": memory_check.needed,
        "overhead_bytes": memory.overhead,
        "memory": (prediction.ranks[0].allocated + (process if device_type(experiment.cluster) == "cpu" else 0)) / GIB,
        "tokens_per_second": speed and speed * ResolvedLayout.of(experiment).devices,
        "evaluations": evaluations_of(experiment),
        **asdict(prediction),
    }


def _check_by_bound(experiment: Experiment, runs: Path) -> MemoryCheck:
    if experiment.plan.gate == "off":
        return MemoryCheck(experiment, None, why_not="plan.gate=off")
    memory = device_memory_of(ResolvedLayout.of(experiment), model_spec(experiment.model), runs)
    if memory.capacity is None:
        return MemoryCheck(experiment, memory, why_not=memory.unknown)
    bound = upper_bound(experiment)
    fits = bound is not None and bound * memory.sharing <= memory.capacity
    return MemoryCheck(experiment, memory, bound if fits else None)


def fits_unsharded(experiment: Experiment, runs: Path) -> bool:
    """True if the upper bound of a run with a resolved layout says that `parallelism.dp_shard=1` would fit, too."""
    alone = with_values(experiment, {"parallelism.dp_shard": 1})
    with suppress(UserError):
        check(alone)
        return _check_by_bound(alone, runs).bound is not None
    return False


def _request(memory_check: MemoryCheck) -> PredictionRequest | None:
    experiment, memory = memory_check.experiment, memory_check.device_memory
    if memory is None:
        return None
    undecided = memory.capacity is not None and memory_check.bound is None
    if undecided or experiment.plan.predict == "always":
        return PredictionRequest(experiment, memory.device)
    # User code alone is checked.
    return PredictionRequest(experiment, memory.device, NotPredicted("")) if import_paths(experiment) else None
