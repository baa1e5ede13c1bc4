"""Layouts of a search: searched keys, seeds on a number of GPUs, and launch commands. Imports no torch."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations, product
from operator import attrgetter
from shlex import quote
from typing import Any, TypeVar

from titan_exp.config.errors.user_error import UserError, divisors, shown
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.optimizer import keeps_fp32_moments
from titan_exp.config.groups.parallelism import ParallelismConfig, QuantizationConfig
from titan_exp.config.layout.axes import DEGREES
from titan_exp.config.layout.resolved_layout import LOSS_CHUNK_TOKENS, ResolvedLayout, resolve_kernels, share_of_world
from titan_exp.models.spec.lookup import model_spec
from titan_exp.models.spec.model_spec import ModelSpec

SCHEDULES = ("1F1B", "Interleaved1F1B")
"""Searched schedules. GPipe and LoopedBFS have the same bubbles with more micro-batches in flight."""
MAX_MICRO_BATCH = 8
SCHEDULE, EP, ETP = "parallelism.pp_schedule", "parallelism.ep", "parallelism.etp"
MICRO_BATCH, MODE = "training.micro_batch_size", "activation_checkpoint.mode"
DEGREE_KEYS = (*(f"parallelism.{degree}" for degree in DEGREES), EP, ETP)
KEYS = (*DEGREE_KEYS[:-2], SCHEDULE, EP, ETP, MICRO_BATCH, MODE)
"""Keys that a search varies unless the command line fixes them; commands give all their values."""
REFINED = (
    "activation_checkpoint.every",
    "activation_checkpoint.budget",
    "compile.enabled",
    "parallelism.async_tp",
    "parallelism.cp_method",
    "parallelism.pp_layers_per_stage",
    "parallelism.reshard_after_forward",
    "training.loss_chunk_tokens",
)
"""Further keys that a search varies unless fixed; commands give only values that differ from the typed run."""
RECIPE = "quantization"  # group of recipes, searched like `REFINED` on request
MODES = ("none", "selective", "full")
"""Recomputation modes, fastest first; seeds take the first one that the rules allow."""
SEED_PIPELINES, SEED_TOKENS = (2, 8), 2**14  # pipeline degrees of the seeds, and the most tokens in their micro-batches


@dataclass(frozen=True)
class Candidate:
    """Layout in a search."""

    experiment: Experiment
    spec: ModelSpec | None
    refined: tuple[tuple[str, Any], ...] = ()  # values of `REFINED` keys, and a recipe, that differ from the typed run

    @cached_property
    def identity(self) -> tuple[Any, ...]:
        """Values of all searched keys."""
        return self.base, self.refined

    @cached_property
    def base(self) -> tuple[Any, ...]:
        """Values of `KEYS`."""
        return attrgetter(*KEYS)(self.experiment)

    @cached_property
    def layout(self) -> ResolvedLayout:
        """Resolved layout of one world, with its share of a step."""
        return ResolvedLayout.of(share_of_world(self.experiment))

    @property
    def parallelism(self) -> ParallelismConfig:
        """Degrees and pipeline options."""
        return self.experiment.parallelism

    @property
    def mode(self) -> str:
        """Activation checkpointing mode."""
        return self.experiment.activation_checkpoint.mode

    @property
    def values(self) -> dict[str, Any]:
        """Overrides of searched keys that turn the typed run into this one."""
        has_experts = self.spec is not None and self.spec.has_experts
        idle = [*([SCHEDULE] if self.parallelism.pp == 1 else []), *([] if has_experts else [EP, ETP])]
        values = {key: value for key, value in zip(KEYS, self.base, strict=True) if key not in idle}
        return values | dict(self.refined)


@dataclass(frozen=True)
class SearchSpace:
    """Searched keys of a run on a number of GPUs."""

    run: Experiment  # typed run, with its kernels resolved
    gpus: int
    fixed: frozenset[str] = frozenset()
    recipes: Mapping[str, QuantizationConfig] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "run", resolve_kernels(self.run))

    def candidate(self, experiment: Experiment, recipe: str | None = None) -> Candidate:
        """Candidate with its differences from the typed run; `recipe` is given if it differs from the typed one."""
        refined_values = attrgetter(*REFINED)
        typed = zip(REFINED, refined_values(experiment), refined_values(self.run), strict=True)
        refined = {key: value for key, value, before in typed if value != before}
        more = [(RECIPE, recipe)] if recipe else []
        return Candidate(experiment, model_spec(experiment.model), (*refined.items(), *more))

    def seeds(self, mode: str) -> Iterator[Iterator[Candidate]]:
        """For each seed of a search, layouts by similarity to it, the most similar first; they may break rules. Seeds
        are FSDP alone, and FSDP with tensor parallelism in a node, replicas, context, pipeline or expert parallelism.
        Raises UserError if no product of degrees is the number of GPUs."""
        layouts = list(self._layouts(mode))
        if not layouts:
            given = [key for key in sorted(self.fixed) if key.partition(".")[2] in DEGREES]
            degrees = " ".join(f"{key}={attrgetter(key)(self.run)}" for key in given)
            raise UserError(
                f"plan search: {degrees} does not divide {self.gpus} GPUs. Use another --gpus, or leave a degree out, "
                "so that the search chooses it."
            )
        node = ResolvedLayout.of(layouts[0]).node_size
        plain = [{}, {"tp": node}, {"dp_replicate": max(2, self.gpus // node)}, {"cp": 2}, {"ep": node}]
        pipelines = [{"pp": pp, **more} for pp in SEED_PIPELINES for more in ({}, {"tp": node}, {"ep": node})]
        experts = any(layout.parallelism.ep > 1 for layout in layouts)
        for ideal in (*plain, *pipelines):
            if experts or "ep" not in ideal:
                yield (self.candidate(each) for each in sorted(layouts, key=lambda each: _distance(each, ideal)))

    def _layouts(self, mode: str) -> Iterator[Experiment]:
        """All products of degrees, with one schedule, one micro-batch size, and recomputation by `mode`."""
        run, fixed = self.run, self.fixed
        checkpointing = run.activation_checkpoint if MODE in fixed else replace(run.activation_checkpoint, mode=mode)
        for degrees in _degrees(run.parallelism, self.gpus, fixed):
            rows = math.gcd(*run.training.batch_sizes) // (degrees["dp_replicate"] * degrees["dp_shard"])
            # Micro-batches are small if they must fill a pipeline.
            most = 1 if degrees["pp"] > 1 else SEED_TOKENS * degrees["cp"] // run.training.seq_len
            size = micro_batches(rows, min(MAX_MICRO_BATCH, max(1, most)))[-1]
            batch = {} if MICRO_BATCH in fixed else {"micro_batch_size": size}
            schedule = run.parallelism.pp_schedule if SCHEDULE in fixed or degrees["pp"] == 1 else SCHEDULES[0]
            for ep, etp in expert_degrees(run, degrees, fixed):
                yield replace(
                    run,
                    parallelism=replace(run.parallelism, **degrees, pp_schedule=schedule, ep=ep, etp=etp),
                    training=replace(run.training, **batch),
                    activation_checkpoint=checkpointing,
                )


def _distance(layout: Experiment, ideal: Mapping[str, int]) -> float:
    """Doublings of degrees between a layout and an ideal one, in which axes that it does not name are unused."""
    own = layout.parallelism
    searched = ("dp_replicate", "tp", "cp", "pp", "ep", "etp")
    return sum(abs(math.log2(getattr(own, key) / ideal.get(key, 1))) for key in searched)


def fixed_keys(overrides: Sequence[str]) -> frozenset[str]:
    """Searched keys fixed by overrides."""
    typed = {override.lstrip("+").partition("=")[0] for override in overrides}
    groups = typed & {"activation_checkpoint", "compile", RECIPE}
    return frozenset(key for key in (*KEYS, *REFINED, RECIPE) if key in typed or key.partition(".")[0] in groups)


def train_command(candidate: Candidate, typed: Sequence[str], more: Mapping[str, Any]) -> str:
    """Launch command of a layout: typed overrides, searched keys, and `more` keys with values."""
    values = {**candidate.values, **more}
    kept = [word for word in typed if word.lstrip("+").partition("=")[0] not in values]
    return " ".join(["titan-exp train", *map(quote, kept), *(f"{key}={shown(value)}" for key, value in values.items())])


def expert_degrees(
    experiment: Experiment, degrees: Mapping[str, int], fixed: Collection[str]
) -> Iterator[tuple[int, int]]:
    """Searched values of `parallelism.ep` and `etp`: experts are whole or divided by `tp`; `ep` divides the regrouped
    ranks and the number of experts."""
    parallelism, spec = experiment.parallelism, model_spec(experiment.model)
    counts = [] if spec is None else [linear.experts for linear in spec.expert_linears]
    for etp in [parallelism.etp] if ETP in fixed or not counts else sorted({1, degrees["tp"]}):
        ranks = degrees["dp_shard"] * degrees["cp"] * degrees["tp"] // etp
        for ep in [parallelism.ep] if EP in fixed or not counts else divisors(math.gcd(ranks, *counts)):
            yield ep, etp


def micro_batches(sequences: int, most: int = MAX_MICRO_BATCH) -> list[int]:
    """Searched micro-batch sizes for a data-parallel rank with this many sequences."""
    return [size for size in divisors(max(1, sequences)) if size <= most]


def _degrees(parallelism: ParallelismConfig, gpus: int, fixed: Collection[str]) -> Iterator[dict[str, int]]:
    typed = {degree: getattr(parallelism, degree) for degree in DEGREES if f"parallelism.{degree}" in fixed}
    *searched, last = sorted(DEGREES, key=lambda degree: degree not in typed)
    # -1 takes the remaining factor.
    choices = {degree: [typed[degree]] if typed.get(degree, 0) > 0 else divisors(gpus) for degree in DEGREES}
    for values in product(*(choices[degree] for degree in searched)):
        left, remainder = divmod(gpus, math.prod(values))
        if not remainder and left in choices[last]:
            yield {**dict(zip(searched, values, strict=True)), last: left}


def least_bytes(candidate: Candidate) -> float:
    """Estimate of the memory that a layout needs at least: its state, gradients, and the linears' outputs that are
    kept; 0 for a model of your own."""
    layout, spec, own = candidate.layout, candidate.spec, candidate.parallelism
    if spec is None:
        return 0.0
    pieces, passes = own.tp * own.pp * own.ep, layout.gradient_accumulation
    sharded = spec.parameters / max(pieces, own.tp * own.pp * own.dp_shard * own.cp)
    # Accumulated gradients are whole until a step's last micro-batch.
    gradients = 4 * (spec.parameters / pieces if passes > 1 else sharded)
    outputs = sum(linear.outputs * linear.active_experts for layer in spec.blocks for linear in layer.linears)
    kept = {"none": outputs, "full": spec.dim * len(spec.blocks)}.get(candidate.mode, outputs / 3)
    tokens = layout.micro_batch_size * layout.training.seq_len / own.cp * min(1.0, passes / own.pp)
    return 4 * sharded * (1 + (candidate.experiment.optimizer.max_state or 0)) + gradients + 2 * kept * tokens / own.tp


T = TypeVar("T")
BUDGETS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # searched values of activation_checkpoint.budget; a move goes to the next one
MAX_EVERY = 8
LOSS_CHUNK = "training.loss_chunk_tokens"
LEAST_CHUNK = 2048  # fewest searched tokens of `LOSS_CHUNK`; further values double, up to a micro-batch's tokens
RESHARDED = ("always", "all_but_last", "never")  # values of parallelism.reshard_after_forward, least memory first
CP_METHODS = ("ring", "allgather", "ulysses")
IDLE_AFTER = {
    MODE: ("activation_checkpoint.every", "activation_checkpoint.budget"),
    SCHEDULE: ("parallelism.pp_layers_per_stage",),
}
"""Keys that lose their meaning when a key gets a new value."""
_RECOMPUTED = {"none": 0, "full": 2}
"""Rank of modes by their share of recomputed work; the other modes, 1, do not always compare."""


@dataclass(frozen=True)
class Move:
    """Move from one run to another."""

    values: Mapping[str, Any]  # new values of keys; the value of `RECIPE` is the recipe's name
    experiment: Experiment
    direction: int = 0  # 1 for more memory and no more time, -1 for the opposite, 0 if neither is known


def moves(
    run: Experiment,
    fixed: Collection[str] = (),
    recipes: Mapping[str, QuantizationConfig] | None = None,
    typed: Experiment | None = None,
) -> Iterator[Move]:
    """Moves with the same number of devices, also to one of `recipes`; `fixed` keys stay. Keys that lose their meaning
    get their values in the `typed` run."""
    yield from _degree_moves(run, fixed)
    for key, values in _values(run).items():
        idle = {other: attrgetter(other)(typed or run) for other in IDLE_AFTER.get(key, ()) if other not in fixed}
        for direction, value in values if key not in fixed else ():
            yield Move({key: value}, with_values(run, {**idle, key: value}), direction)
    for name, quantization in (recipes or {}).items() if RECIPE not in fixed else ():
        if quantization.recipe != run.quantization.recipe:
            yield Move({RECIPE: name}, resolve_kernels(replace(run, quantization=quantization)))


def further_moves(run: Experiment) -> Iterator[Move]:
    """Moves to less memory that a search never makes: to more devices, many times the degree, one micro-batch, other
    numerics, and slower checkpoints."""
    for degree, factor in (("dp_shard", 2), ("dp_shard", 4), ("tp", 2), ("pp", 2)):
        yield _move(run, {f"parallelism.{degree}": factor * getattr(run.parallelism, degree)}, -1)
    for degree, factor in product(("tp", "pp"), (4, 8)):
        sharded, rest = divmod(run.parallelism.dp_shard, factor)
        if sharded and not rest:
            more = factor * getattr(run.parallelism, degree)
            yield _move(run, {"parallelism.dp_shard": sharded, f"parallelism.{degree}": more}, -1)
    if run.training.micro_batch_size is not None:
        yield _move(run, {MICRO_BATCH: None})
    if keeps_fp32_moments(run.optimizer):
        yield _move(run, {"optimizer.state_precision": "int8"}, -1)
    if run.checkpoint.mode.startswith("async"):
        yield _move(run, {"checkpoint.mode": "sync"}, -1)


def with_values(run: Experiment, values: Mapping[str, Any]) -> Experiment:
    """Copy of a run with other values of keys."""
    for key, value in values.items():
        group, _, name = key.partition(".")
        run = replace(run, **{group: replace(getattr(run, group), **{name: value})})
    return run


def _move(run: Experiment, values: Mapping[str, Any], direction: int = 0) -> Move:
    return Move(values, with_values(run, values), direction)


def _degree_moves(run: Experiment, fixed: Collection[str]) -> Iterator[Move]:
    """Moves of a prime factor from one degree to another, and moves to other expert degrees."""
    own, spec = run.parallelism, model_spec(run.model)
    for one, other in permutations([key for key in DEGREES if f"parallelism.{key}" not in fixed], 2):
        for prime in divisors(getattr(own, one)):
            if len(divisors(prime)) == 2:
                fewer, more = getattr(own, one) // prime, getattr(own, other) * prime
                yield _move(run, {f"parallelism.{one}": fewer, f"parallelism.{other}": more})
    if spec is not None and spec.has_experts:
        degrees = {key: getattr(own, key) for key in DEGREES}
        for ep, etp in expert_degrees(run, degrees, {EP, ETP} & set(fixed)):
            if (ep != own.ep) + (etp != own.etp) == 1:
                yield _move(run, {EP: ep, ETP: etp})


def _values(run: Experiment) -> dict[str, Iterable[tuple[int, Any]]]:
    layout, compiled = ResolvedLayout.of(share_of_world(run)), run.compile
    own, checkpointing, mode = layout.parallelism, run.activation_checkpoint, run.activation_checkpoint.mode
    modes = ["none", "selective", "every_n", "full", *(["budget"] if compiled.compiles("blocks") else [])]
    rank = _RECOMPUTED.get(mode, 1)
    next_every = [(step, checkpointing.every + step) for step in (-1, 1)] if mode == "every_n" else []
    has_budget = mode == "budget" or checkpointing.automatic is not None
    budgets = sorted({*BUDGETS, checkpointing.budget}) if has_budget else [checkpointing.budget]
    policies = RESHARDED if own.dp_shard * own.cp > 1 else (layout.reshard_policy,)
    # Symmetric memory reaches over the links of a node.
    may_be_async = compiled.enabled and 1 < own.tp <= layout.node_size
    size = layout.micro_batch_size
    return {
        MODE: [(rank - _RECOMPUTED.get(other, 1), other) for other in modes if other != mode],
        MICRO_BATCH: _others(size, micro_batches(layout.common_share, max(size, MAX_MICRO_BATCH))),
        "activation_checkpoint.every": [(step, every) for step, every in next_every if 1 < every <= MAX_EVERY],
        "activation_checkpoint.budget": _beside(checkpointing.budget, budgets),
        LOSS_CHUNK: _loss_chunks(layout),
        SCHEDULE: _others(own.pp_schedule, SCHEDULES) if own.pp > 1 else (),
        "parallelism.pp_layers_per_stage": _interleaved(layout) if own.pp > 1 and own.pp_layers is None else (),
        "parallelism.reshard_after_forward": _beside(layout.reshard_policy, policies),
        "parallelism.cp_method": _others(own.cp_method, CP_METHODS) if own.cp > 1 else (),
        "parallelism.async_tp": [(0, not own.async_tp)] if may_be_async else (),
        "compile.enabled": [(0, not compiled.enabled)],
    }


def _others(own: T, values: Iterable[T]) -> list[tuple[int, T]]:
    return [(0, value) for value in values if value != own]


def _beside(own: T, values: Sequence[T]) -> list[tuple[int, T]]:
    """Neighbours of a value in a sequence, with -1 before and 1 after it."""
    at = values.index(own)
    return [(place - at, values[place]) for place in (at - 1, at + 1) if 0 <= place < len(values)]


def _interleaved(layout: ResolvedLayout) -> Iterator[tuple[int, int]]:
    """Layers per stage for the next smaller and larger number of stages per pipeline rank, with their directions."""
    own, held = layout.parallelism, layout.layers
    if own.pp == layout.stage_count or own.pp_schedule not in SCHEDULES:
        return
    held += own.pp_first_stage_less + own.pp_last_stage_less
    counts = {-(-held // layers): layers for layers in range(held // own.pp, 0, -1)}
    valid = sorted(count for count in {*counts, layout.stage_count} if count % own.pp == 0 and count > own.pp)
    yield from ((0, counts[count]) for _, count in _beside(layout.stage_count, valid))


def _loss_chunks(layout: ResolvedLayout) -> Iterator[tuple[int, int | str]]:
    """Tokens of a logits chunk halved and doubled, with directions; for whole logits, the smallest chunk."""
    tokens = layout.micro_batch_size * layout.training.seq_len // layout.parallelism.cp
    if layout.loss_chunk_tokens is None:
        yield from [(-1, LEAST_CHUNK)] * (tokens > LEAST_CHUNK)
        return
    chunk = min(tokens, layout.loss_chunk_tokens)
    for other in (chunk // 2, min(2 * chunk, tokens)):
        if other > chunk or LEAST_CHUNK <= other < chunk:
            yield other - chunk, "auto" if other == min(tokens, LOSS_CHUNK_TOKENS) else other
