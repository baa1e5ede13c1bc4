"""Moves of a local search: to layouts that differ in a single key, or in a prime factor of two degrees."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import permutations
from typing import Any, TypeVar

from titan_exp.config.errors.user_error import UserError, divisors
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.axes import DEGREES
from titan_exp.config.layout.resolved_layout import LOSS_CHUNK_TOKENS, ResolvedLayout, resolve_kernels
from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.extrapolate.eligibility import unsupported_reason
from titan_exp.plan.search.layouts import (
    EP,
    ETP,
    RECIPE,
    SCHEDULES,
    Candidate,
    SearchSpace,
    expert_degrees,
    micro_batches,
)
from titan_exp.plan.supported import check_supported
from titan_exp.rules import EVERY_RULE
from titan_exp.rules.rule import find_violations

T = TypeVar("T")

BUDGETS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Searched values of activation_checkpoint.budget; a move goes to the next."""
MAX_EVERY = 8
"""Largest searched value of activation_checkpoint.every."""
LEAST_CHUNK = 2048
"""Fewest searched tokens of training.loss_chunk_tokens; more are doubled, up to those of a micro-batch."""
RESHARDED = ("always", "all_but_last", "never")
"""Values of parallelism.reshard_after_forward, the least memory first."""
CP_METHODS = ("ring", "allgather", "ulysses")
"""Values of parallelism.cp_method."""

IDLE_AFTER = {"activation_checkpoint.mode": ("every", "budget"), "parallelism.pp_schedule": ("pp_layers_per_stage",)}
"""Keys of the same group that a new value of a key makes meaningless."""
_RECOMPUTED = {"none": 0, "full": 2}
"""Rank of modes by the share of recomputed work; some of the others, 1, do not compare."""

Move = tuple[int, Experiment, str | None]
"""Direction, moved run and new recipe. The direction is 1 for more memory and no more time, -1 for the opposite, 0 if
neither is known."""


def moves(candidate: Candidate, space: SearchSpace, device: Device) -> Iterator[tuple[int, Candidate]]:
    """Neighbours of a layout that break no rule and can be extrapolated, each with the direction of its move."""
    for direction, experiment, recipe in (*_degrees(candidate, space), *_keys(candidate, space)):
        if not any(find_violations(EVERY_RULE, experiment)) and _is_supported(experiment, device):
            yield direction, space.moved(candidate, experiment, recipe)


def _is_supported(experiment: Experiment, device: Device) -> bool:
    with suppress(UserError):
        check_supported(experiment, device)
        return unsupported_reason(experiment) is None
    return False


def _degrees(candidate: Candidate, space: SearchSpace) -> Iterator[Move]:
    """Prime factors that move from one degree to another, and other degrees of experts."""
    own, experiment = candidate.parallelism, candidate.experiment
    for one, other in permutations([key for key in DEGREES if f"parallelism.{key}" not in space.fixed], 2):
        for prime in divisors(getattr(own, one)):
            if len(divisors(prime)) == 2:
                degrees = {one: getattr(own, one) // prime, other: getattr(own, other) * prime}
                yield 0, replace(experiment, parallelism=replace(own, **degrees)), None
    if candidate.experts is not None:
        degrees = {key: getattr(own, key) for key in DEGREES}
        for ep, etp in expert_degrees(experiment, degrees, space.fixed & {EP, ETP}):
            if (ep != own.ep) + (etp != own.etp) == 1:
                yield 0, replace(experiment, parallelism=replace(own, ep=ep, etp=etp)), None


def _keys(candidate: Candidate, space: SearchSpace) -> Iterator[Move]:
    """Other values of single keys. Keys without meaning after a move get their typed values."""
    experiment = candidate.experiment
    for key, values in _values(candidate).items():
        group, _, name = key.partition(".")
        idle = [other for other in IDLE_AFTER.get(key, ()) if f"{group}.{other}" not in space.fixed]
        typed = {other: getattr(getattr(space.base, group), other) for other in idle}
        for direction, value in values if key not in space.fixed else ():
            changed = replace(getattr(experiment, group), **typed, **{name: value})
            yield direction, replace(experiment, **{group: changed}), None
    for name, quantization in space.recipes.items():
        if quantization.recipe != experiment.quantization.recipe and RECIPE not in space.fixed:
            yield 0, resolve_kernels(replace(experiment, quantization=quantization)), name


def _values(candidate: Candidate) -> dict[str, Iterable[tuple[int, Any]]]:
    """Directions and new values of moves, by key."""
    own, layout, compiled = candidate.parallelism, candidate.layout, candidate.experiment.compile
    checkpointing = candidate.experiment.activation_checkpoint
    modes = ["none", "selective", "every_n", "full", *(["budget"] if compiled.compiles("blocks") else [])]
    rank = _RECOMPUTED.get(candidate.mode, 1)
    next_every = [(step, checkpointing.every + step) for step in (-1, 1)] if candidate.mode == "every_n" else []
    has_budget = candidate.mode == "budget" or checkpointing.automatic is not None
    budgets = sorted({*BUDGETS, checkpointing.budget}) if has_budget else [checkpointing.budget]
    policies = RESHARDED if candidate.shards > 1 else (layout.reshard_policy,)
    # Symmetric memory reaches over the links of a node.
    may_be_async = compiled.enabled and 1 < own.tp <= layout.node_size
    return {
        "training.micro_batch_size": _others(layout.micro_batch_size, micro_batches(layout.common_share)),
        "activation_checkpoint.mode": [
            (rank - _RECOMPUTED.get(mode, 1), mode) for mode in modes if mode != candidate.mode
        ],
        "activation_checkpoint.every": [(step, every) for step, every in next_every if 1 < every <= MAX_EVERY],
        "activation_checkpoint.budget": _beside(checkpointing.budget, budgets),
        "training.loss_chunk_tokens": _loss_chunks(layout),
        "parallelism.pp_schedule": _others(own.pp_schedule, SCHEDULES) if own.pp > 1 else (),
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
    """Half and twice the tokens of a chunk of logits."""
    tokens = layout.micro_batch_size * layout.training.seq_len // layout.parallelism.cp
    if layout.loss_chunk_tokens is None:
        return
    chunk = min(tokens, layout.loss_chunk_tokens)
    for other in (chunk // 2, min(2 * chunk, tokens)):
        if other > chunk or LEAST_CHUNK <= other < chunk:
            yield other - chunk, "auto" if other == min(tokens, LOSS_CHUNK_TOKENS) else other
