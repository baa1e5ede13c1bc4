"""Memory gate: compares a run's predicted memory with its device's capacity. Imports no torch.

An upper bound from shapes decides small runs; we predict the others. For a run that does not fit it looks for changes
that would fit: combinations of moves, predicted from the cheapest on.
"""

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from shlex import quote
from typing import Any

from titan_exp.config.devices import device_type
from titan_exp.config.errors.user_error import UserError, listed, shown
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.foreign_code import import_paths
from titan_exp.models.spec.lookup import model_spec
from titan_exp.models.spec.mixers import CHUNK
from titan_exp.models.spec.model_spec import LayerSpec
from titan_exp.plan.caching_allocator import STEPS
from titan_exp.plan.devices import SAVE_PROCESS_GB, DeviceMemory, device_memory_of, symmetric_memory
from titan_exp.plan.evaluation import evaluations_of
from titan_exp.plan.extrapolate.eligibility import unsupported_reason
from titan_exp.plan.layouts import KEYS, LOSS_CHUNK, MICRO_BATCH, MODE, Move, further_moves, moves, with_values
from titan_exp.plan.prediction import NotPredicted, Prediction, RankPrediction, exchange_of
from titan_exp.plan.predictions import PredictionRequest, predict_many
from titan_exp.rules import check
from titan_exp.tracking.display import GIB, format_bytes

BYTES_PER_PARAMETER = 128
"""Bytes per parameter in the upper bound: 20 for weight, gradient and three elements of optimizer state; 28 for FSDP's
gathered and reduced copies; 20 for temporaries of update and clipping; 28 for an asynchronous save; 32 as margin."""
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


MAX_SUGGESTIONS = 3
TIME_LIMIT = 60.0  # time limit in seconds; no further combination is predicted after it
BATCH = 2
COPY = "copy of the state"  # category of the memory that an asynchronous save holds on a CPU
RECOMPUTATION = {"selective": (2.0, 0.25), "full": (5.0, 0.02)}
"""Cost, and best-case factor of activations, by suggested value of activation_checkpoint.mode."""
OF_MICRO_BATCH = ("activations", "loss", "communication", "other")
"""Memory categories in proportion to the size of micro-batches."""
SHARDED = ("parameters", "gradients", "optimizer")  # memory categories divided by the number of shards


@dataclass(frozen=True)
class Offer:
    """Move that may save memory; the default saves none."""

    move: Move | None = None
    option: str = ""  # key of the move, or `parallelism`; a suggestion has at most one move per option
    cost: float = 0.0  # cost in speed, numerics or devices, in a unit that only orders offers
    categories: tuple[str, ...] | None = ()  # memory categories that shrink; None means all
    factor: float = 1.0
    growth: float = 1.0  # factor of activations, which more sequences in a micro-batch enlarge


@dataclass(frozen=True)
class Changes:
    """Result of looking for changes that make a run fit."""

    found: dict[tuple[str, ...], MemoryCheck]
    """Cheapest overrides that make the run fit, each with its prediction; empty if none is found in time."""
    tried: list[tuple[str, ...]]
    is_cut_off: bool  # True if the time limit left combinations untried before any was found to fit


def find_changes(memory_check: MemoryCheck, runs: Path, say: Callable[[str], None] = lambda _: None) -> Changes:
    """Predict combinations of moves, the cheapest first, until some fit or the time is over."""
    began, found, chosen = time.monotonic(), dict[tuple[str, ...], MemoryCheck](), list[tuple[int, ...]]()
    tried: list[tuple[str, ...]] = []
    say("It does not fit. Looking for changes that would fit, for up to a minute ...")
    candidates = _candidates(memory_check)
    while len(found) < MAX_SUGGESTIONS and time.monotonic() - began < TIME_LIMIT:
        # Skip supersets of a suggestion.
        fresh = (candidate for candidate in candidates if not any(_contains(candidate[0], other) for other in chosen))
        batch = list(itertools.islice(fresh, BATCH))
        if not batch:
            break
        checks = check_memory([experiment for _, _, experiment in batch], runs)
        tried += [overrides for _, overrides, _ in batch]
        for (levels, overrides, _), changed in zip(batch, checks, strict=True):
            if changed.fits and not any(_contains(levels, other) for other in chosen):
                found[overrides] = changed
                chosen.append(levels)
    cheapest = dict(itertools.islice(found.items(), MAX_SUGGESTIONS))
    return Changes(cheapest, tried, not found and next(candidates, None) is not None)


def explain_changes(
    memory_check: MemoryCheck, runs: Path, say: Callable[[str], None] = lambda _: None, typed: Sequence[str] = ()
) -> str:
    """Explain why a run does not fit, and which changes would make it fit; `typed` are its overrides and options."""
    changes = find_changes(memory_check, runs, say)
    found = changes.found
    lines = [f"This run does not fit: {explain_oom(memory_check)}"]
    if found:
        lines.append("  Predicted to fit:")
        width = max(len(" ".join(overrides)) for overrides in found)
        lines += [f"    {' '.join(overrides):{width}}  {_outcome(changed)}" for overrides, changed in found.items()]
    else:
        lines += [f"  {line}" for line in _no_change(memory_check, changes, typed)]
    return "\n".join(lines)


def _no_change(memory_check: MemoryCheck, changes: Changes, typed: Sequence[str]) -> Iterator[str]:
    run, layout = memory_check.experiment, ResolvedLayout.of(memory_check.experiment)
    values = defaultdict[str, dict[str, None]](dict)
    for key, _, value in (word.partition("=") for overrides in changes.tried for word in overrides):
        values[key][value] = None
    tried = ", ".join(f"{key}={listed(found)}" for key, found in values.items())
    yield f"None of the changes that we tried fits: {tried}." if tried else "We know no change that could make it fit."
    if changes.is_cut_off:
        yield f"We stopped after {TIME_LIMIT:.0f} s, before we had tried all of their combinations."
    size, name = max((size, name) for name, size in memory_check.planned[0].largest.by_category.items())
    yield f"The largest part is {name}, {format_bytes(size)}."
    passes = layout.gradient_accumulation
    if name == "gradients" and passes > 1 and run.parallelism.dp_shard * run.parallelism.cp > 1:
        yield (
            f"A step has {passes} micro-batches, and a rank keeps the sum of their gradients unsharded "
            "(titan-exp help memory-and-compile)."
        )
    for overrides in itertools.islice(_changes_of_results(memory_check), MAX_SUGGESTIONS):
        yield f"May fit, but changes what the run learns, so we did not try it: {' '.join(overrides)}"
    if layout.device_type == "cpu" or unsupported_reason(run) is not None:
        yield "Use a smaller model or shorter sequences."
        return
    searched = {*KEYS, "activation_checkpoint"}
    kept = [word for word in typed if word.lstrip("+").partition("=")[0] not in searched]
    if run.training.mixed_precision == "fp32":
        key = "training.mixed_precision"
        kept = [*(word for word in kept if not word.lstrip("+").startswith(f"{key}=")), f"{key}=bf16"]
    command = " ".join(quote(word) for word in kept)
    yield f"Try all layouts: titan-exp plan search --gpus {layout.world_size} {command}".rstrip()


def _changes_of_results(memory_check: MemoryCheck) -> Iterator[tuple[str, ...]]:
    """Overrides that may fit, by estimate, with other results: one sequence per rank and step, whose gradients stay
    sharded, or their sum in bf16; with the least recomputation."""
    run, layout = memory_check.experiment, ResolvedLayout.of(memory_check.experiment)
    own, training, ways = run.parallelism, run.training, list[tuple[dict[str, Any], list[Offer]]]()
    ranks = own.dp_replicate * own.dp_shard * run.cluster.worlds
    whole = layout.gradient_accumulation > 1
    if own.pp == 1 and ranks < training.global_batch_size:
        one = {} if training.micro_batch_size in (None, 1) else {MICRO_BATCH: 1}
        shards = own.dp_shard * own.cp if whole else 1
        gradients = Offer(categories=("gradients",), factor=1 / shards)
        rest = Offer(categories=OF_MICRO_BATCH, factor=1 / layout.micro_batch_size)
        ways.append(({"training.global_batch_size": ranks, **one}, [gradients, rest]))
    if whole and training.accumulation_precision != "bf16":
        ways.append(({"training.accumulation_precision": "bf16"}, [Offer(categories=("gradients",), factor=0.5)]))
    modes = {"none": (None, "selective", "full"), "selective": (None, "full")}
    for values, offers in ways:
        for mode in modes.get(run.activation_checkpoint.mode, (None,)):
            kept = Offer(categories=("activations",), factor=1.0 if mode is None else RECOMPUTATION[mode][1])
            changed = values if mode is None else {**values, MODE: mode}
            if not _may_fit(memory_check, [*offers, kept]):
                continue
            with suppress(UserError):
                check(with_values(run, changed))
                yield tuple(_override(key, value) for key, value in changed.items())
                break


def _outcome(memory_check: MemoryCheck) -> str:
    if memory_check.prediction is None:
        return "fits by an upper bound"
    prediction, memory = memory_check.planned
    together = f"{format_bytes(memory_check.needed or 0)} together" if memory.sharing > 1 else ""
    peak = format_bytes(memory_check.process_bytes(prediction.largest))
    return ", ".join(filter(None, (peak, explain_retries(memory_check), together)))


def _candidates(memory_check: MemoryCheck) -> Iterator[tuple[tuple[int, ...], tuple[str, ...], Experiment]]:
    """Combinations of moves that may fit and break no rule, cheapest first, each with its level per option."""
    by_option = defaultdict[str, list[Offer]](lambda: [Offer()])
    for offer in _offers(memory_check):
        by_option[offer.option].append(offer)
    options = [enumerate(sorted(offers, key=lambda offer: -offer.factor)) for offers in by_option.values()]
    for combination in sorted(itertools.product(*options), key=lambda found: sum(offer.cost for _, offer in found)):
        levels, offers = zip(*combination, strict=True)
        if not any(levels) or not _may_fit(memory_check, offers):
            continue
        values: dict[str, Any] = {}
        for offer in offers:
            values |= offer.move.values if offer.move is not None else {}
        changed = with_values(memory_check.experiment, values)
        with suppress(UserError):
            check(changed)
            yield levels, tuple(_override(key, value) for key, value in values.items()), changed


def _may_fit(memory_check: MemoryCheck, offers: Sequence[Offer]) -> bool:
    prediction, memory = memory_check.planned
    largest, overhead = prediction.largest, memory.overhead * memory.sharing
    sizes = {**largest.by_category, COPY: staged(memory_check.experiment, largest)}
    best = 0.0
    for name, size in sizes.items():
        shrinking = (offer for offer in offers if offer.categories is None or name in offer.categories)
        growth = math.prod(offer.growth for offer in offers) if name == "activations" else 1.0
        best += size * growth * math.prod(offer.factor for offer in shrinking)
    needed = memory_check.needed or 0
    return (needed - overhead) * best / sum(sizes.values()) + overhead <= (memory.capacity or 0)


def _offers(memory_check: MemoryCheck) -> Iterator[Offer]:
    run = memory_check.experiment
    layout, on_cpu = ResolvedLayout.of(run), ResolvedLayout.of(run).device_type == "cpu"
    now, tokens = layout.micro_batch_size, layout.micro_batch_size * layout.training.seq_len
    for move in (*moves(run), *further_moves(run)):
        key, value = next(iter(move.values.items()))
        if key == MODE and move.direction < 0 and value in RECOMPUTATION:
            cost, factor = RECOMPUTATION[value]
            yield Offer(move, key, cost, ("activations",), factor)
        elif key == MICRO_BATCH and value is None:
            whole, shards = ResolvedLayout.of(move.experiment), run.parallelism.dp_shard * run.parallelism.cp
            if layout.gradient_accumulation > whole.gradient_accumulation == 1:  # nothing is accumulated unsharded
                yield Offer(move, key, 1.0, ("gradients",), 1 / shards, whole.micro_batch_size / now)
        elif key == MICRO_BATCH and value < now:
            yield Offer(move, key, 1.0 + 0.5 * math.log2(now / value), OF_MICRO_BATCH, value / now)
        elif key == LOSS_CHUNK and move.direction < 0:
            chunks = [at.loss_chunk_tokens or tokens for at in (ResolvedLayout.of(move.experiment), layout)]
            yield Offer(move, key, 1.0, ("loss",), chunks[0] / chunks[1])
        elif key == "optimizer.state_precision":
            yield Offer(move, key, 4.0, ("optimizer",), 0.28)
        elif key == "checkpoint.mode" and staged(run, memory_check.planned[0].largest):
            yield Offer(move, key, 0.5, (COPY,), 0.0)
        elif key.startswith("parallelism.") and not on_cpu and (offer := _degrees(move, run)):
            yield offer


def _degrees(move: Move, run: Experiment) -> Offer | None:
    """Offer of other degrees for the same number of GPUs, or of more GPUs; None if it saves little."""
    own, option = run.parallelism, "parallelism"
    more = {key.partition(".")[2] for key, value in move.values.items() if value > attrgetter(key)(run)}
    if move.values.keys() == {"parallelism.dp_shard"}:
        factor = move.values["parallelism.dp_shard"] // own.dp_shard
        # An unset micro-batch size follows from the data-parallel degree.
        sharded = (*SHARDED, "activations", "loss") if run.training.micro_batch_size is None else SHARDED
        return Offer(move, option, 8.0 * math.log2(factor), sharded, 1 / factor)
    times = own.dp_shard // move.values.get("parallelism.dp_shard", own.dp_shard)
    if more <= {"tp", "pp"} and more and (times in (2, 4, 8) or len(move.values) == 1):
        return Offer(move, option, 6.0 * math.log2(times) or 10.0, None, 1 / max(2, times))
    return None


def _contains(levels: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """True if a combination has every change of another, or a stronger one."""
    return all(level >= than for level, than in zip(levels, other, strict=True))


def _override(key: str, value: object) -> str:
    return f"activation_checkpoint={value}" if key == "activation_checkpoint.mode" else f"{key}={shown(value)}"
