"""Moves to other layouts: a new value of a single key, or a prime factor from one degree to another. A search descends
along them, and a run that does not fit is answered with some of them. Imports no torch."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, TypeVar

from titan_exp.config.errors.user_error import divisors
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.optimizer import keeps_fp32_moments
from titan_exp.config.groups.parallelism import QuantizationConfig
from titan_exp.config.layout.axes import DEGREES
from titan_exp.config.layout.resolved_layout import (
    LOSS_CHUNK_TOKENS,
    ResolvedLayout,
    resolve_kernels,
    share_of_world,
)
from titan_exp.models.spec.lookup import model_spec
from titan_exp.plan.search.layouts import (
    EP,
    ETP,
    MAX_MICRO_BATCH,
    MICRO_BATCH,
    MODE,
    RECIPE,
    SCHEDULE,
    SCHEDULES,
    expert_degrees,
    micro_batches,
)

T = TypeVar("T")

BUDGETS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Values of activation_checkpoint.budget; a move goes to the next."""
MAX_EVERY = 8
"""Largest value of activation_checkpoint.every."""
LOSS_CHUNK = "training.loss_chunk_tokens"
LEAST_CHUNK = 2048
"""Fewest tokens of `LOSS_CHUNK`; more are doubled, up to those of a micro-batch."""
RESHARDED = ("always", "all_but_last", "never")
"""Values of parallelism.reshard_after_forward, the least memory first."""
CP_METHODS = ("ring", "allgather", "ulysses")
"""Values of parallelism.cp_method."""

IDLE_AFTER = {MODE: ("every", "budget"), SCHEDULE: ("pp_layers_per_stage",)}
"""Keys of the same group that a new value of a key makes meaningless."""
_RECOMPUTED = {"none": 0, "full": 2}
"""Rank of modes by the share of recomputed work; some of the others, 1, do not compare."""


@dataclass(frozen=True)
class Move:
    """Move from a run to another."""

    values: Mapping[str, Any]
    """New values of keys, with the recipe's name as that of `RECIPE`."""
    experiment: Experiment
    """Moved run, which may break rules."""
    direction: int = 0
    """1 for more memory and no more time, -1 for the opposite, 0 if neither is known."""


def moves(
    run: Experiment,
    fixed: Collection[str] = (),
    recipes: Mapping[str, QuantizationConfig] | None = None,
    typed: Experiment | None = None,
) -> Iterator[Move]:
    """Moves on as many devices, `fixed` keys excluded, to one of `recipes`, too. Keys without meaning after a move get
    their values in the `typed` run."""
    yield from _degree_moves(run, fixed)
    for key, values in _values(run).items():
        group, _, name = key.partition(".")
        idle = [other for other in IDLE_AFTER.get(key, ()) if f"{group}.{other}" not in fixed]
        others = {f"{group}.{other}": getattr(getattr(typed or run, group), other) for other in idle}
        for direction, value in values if key not in fixed else ():
            yield _move(run, {key: value}, direction, others)
    for name, quantization in (recipes or {}).items() if RECIPE not in fixed else ():
        if quantization.recipe != run.quantization.recipe:
            yield Move({RECIPE: name}, resolve_kernels(replace(run, quantization=quantization)))


def further_moves(run: Experiment) -> Iterator[Move]:
    """Moves to less memory that no search makes: to more devices, other numerics, and slower checkpoints."""
    for degree, factors in (("dp_shard", (2, 4)), ("tp", (2,)), ("pp", (2,))):
        for factor in factors:
            yield _move(run, {f"parallelism.{degree}": factor * getattr(run.parallelism, degree)}, -1)
    if keeps_fp32_moments(run.optimizer):
        yield _move(run, {"optimizer.state_precision": "int8"}, -1)
    if run.checkpoint.mode.startswith("async"):
        yield _move(run, {"checkpoint.mode": "sync"}, -1)


def with_values(run: Experiment, values: Mapping[str, Any]) -> Experiment:
    """Run with other values of keys."""
    for key, value in values.items():
        group, _, name = key.partition(".")
        run = replace(run, **{group: replace(getattr(run, group), **{name: value})})
    return run


def _move(
    run: Experiment, values: Mapping[str, Any], direction: int = 0, others: Mapping[str, Any] | None = None
) -> Move:
    return Move(values, with_values(run, {**(others or {}), **values}), direction)


def _degree_moves(run: Experiment, fixed: Collection[str]) -> Iterator[Move]:
    """Prime factors that move from one degree to another, and other degrees of experts."""
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
    """Directions and new values of moves, by key."""
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
    """Values before and after one, with -1 and 1."""
    at = values.index(own)
    return [(place - at, values[place]) for place in (at - 1, at + 1) if 0 <= place < len(values)]


def _interleaved(layout: ResolvedLayout) -> Iterator[tuple[int, int]]:
    """Layers of a stage with the next smaller and larger number of stages on each pipeline rank."""
    own, held = layout.parallelism, layout.layers
    if own.pp == layout.stage_count or own.pp_schedule not in SCHEDULES:
        return
    held += own.pp_first_stage_less + own.pp_last_stage_less
    counts = {-(-held // layers): layers for layers in range(held // own.pp, 0, -1)}
    valid = sorted(count for count in {*counts, layout.stage_count} if count % own.pp == 0 and count > own.pp)
    yield from ((0, counts[count]) for _, count in _beside(layout.stage_count, valid))


def _loss_chunks(layout: ResolvedLayout) -> Iterator[tuple[int, int | str]]:
    """Half and twice the tokens of a chunk of logits; of whole logits, the smallest chunk."""
    tokens = layout.micro_batch_size * layout.training.seq_len // layout.parallelism.cp
    if layout.loss_chunk_tokens is None:
        yield from [(-1, LEAST_CHUNK)] * (tokens > LEAST_CHUNK)
        return
    chunk = min(tokens, layout.loss_chunk_tokens)
    for other in (chunk // 2, min(2 * chunk, tokens)):
        if other > chunk or LEAST_CHUNK <= other < chunk:
            yield other - chunk, "auto" if other == min(tokens, LOSS_CHUNK_TOKENS) else other
