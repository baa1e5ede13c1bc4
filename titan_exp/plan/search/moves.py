"""Moves of a local search: to layouts that differ in a single key, or in a prime factor of two degrees."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any, TypeVar

from titan_exp.config.errors.did_you_mean import divisors
from titan_exp.config.errors.user_error import UserError
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

Move = tuple[int, Experiment, str | None]
"""Direction, moved run and new recipe. The direction is 1 for more memory and no more time, -1 for the opposite, 0 if
neither is known."""


def moves(candidate: Candidate, space: SearchSpace, device: Device) -> Iterator[tuple[int, Candidate]]:
    """Neighbours of a layout that break no rule and can be extrapolated, each with the direction of its move."""
    for direction, experiment, recipe in (*_degrees(candidate, space), *_keys(candidate, space)):
        if not any(find_violations(EVERY_RULE, experiment)) and _is_supported(experiment, device):
            yield direction, space.moved(candidate, experiment, recipe)


def _is_supported(experiment: Experiment, device: Device) -> bool:
    try:
        check_supported(experiment, device)
    except UserError:
        return False
    return unsupported_reason(experiment) is None


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
    """Other values of single keys."""
    experiment = candidate.experiment
    for direction, group, values in _values(candidate, space):
        if not space.fixed & {f"{group}.{key}" for key in values}:
            yield direction, replace(experiment, **{group: replace(getattr(experiment, group), **values)}), None
    for name, quantization in space.recipes.items():
        if quantization.recipe != experiment.quantization.recipe and RECIPE not in space.fixed:
            yield 0, resolve_kernels(replace(experiment, quantization=quantization)), name


def _values(candidate: Candidate, space: SearchSpace) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Directions, groups and changed values of moves in one key."""
    experiment, own, layout = candidate.experiment, candidate.parallelism, candidate.layout

    def defaults(group: str, *keys: str) -> dict[str, Any]:
        """Typed values of keys without meaning after a move."""
        return {key: getattr(getattr(space.base, group), key) for key in keys if f"{group}.{key}" not in space.fixed}

    for size in micro_batches(layout.common_share):
        if size != layout.micro_batch_size:
            yield 0, "training", {"micro_batch_size": size}
    for direction, values in _recomputation(experiment):
        reset = defaults("activation_checkpoint", "every", "budget") if "mode" in values else {}
        yield direction, "activation_checkpoint", {**reset, **values}
    for direction, tokens in _loss_chunks(layout):
        yield direction, "training", {"loss_chunk_tokens": tokens}
    for schedule in SCHEDULES if own.pp > 1 else ():
        if schedule != own.pp_schedule:
            yield 0, "parallelism", {"pp_schedule": schedule, **defaults("parallelism", "pp_layers_per_stage")}
    for layers in _interleaved(layout) if own.pp > 1 and own.pp_layers is None else ():
        yield 0, "parallelism", {"pp_layers_per_stage": layers}
    if candidate.shards > 1:
        for direction, policy in _beside(layout.reshard_policy, RESHARDED):
            yield direction, "parallelism", {"reshard_after_forward": policy}
    for method in CP_METHODS if own.cp > 1 else ():
        if method != own.cp_method:
            yield 0, "parallelism", {"cp_method": method}
    # Symmetric memory reaches over the links of a node.
    if experiment.compile.enabled and 1 < own.tp <= layout.node_size:
        yield 0, "parallelism", {"async_tp": not own.async_tp}
    yield 0, "compile", {"enabled": not experiment.compile.enabled}


def _beside(value: T, values: Sequence[T]) -> list[tuple[int, T]]:
    """Values before and after one, with -1 and 1."""
    at = values.index(value)
    return [(place - at, values[place]) for place in (at - 1, at + 1) if 0 <= place < len(values)]


def _recomputation(experiment: Experiment) -> Iterator[tuple[int, dict[str, Any]]]:
    """Other recomputation with the direction of the move: another mode, or the next value of its number."""
    own = experiment.activation_checkpoint
    modes = ["none", "selective", "every_n", "full"]
    if experiment.compile.compiles("blocks"):
        modes.append("budget")
    for mode in modes:
        if mode != own.mode:
            yield _recomputed(own.mode) - _recomputed(mode), {"mode": mode}
    if own.mode == "every_n":
        for every in (own.every - 1, own.every + 1):
            if 1 < every <= MAX_EVERY:
                yield every - own.every, {"every": every}
    if own.mode == "budget" or own.automatic is not None:
        for direction, budget in _beside(own.budget, sorted({*BUDGETS, own.budget})):
            yield direction, {"budget": budget}


def _recomputed(mode: str) -> int:
    """Rank of a mode by the share of recomputed work; some modes do not compare."""
    return {"none": 0, "full": 2}.get(mode, 1)


def _interleaved(layout: ResolvedLayout) -> Iterator[int]:
    """Layers of a stage with the next smaller and larger number of stages on each pipeline rank."""
    own, held = layout.parallelism, layout.layers
    if own.pp == layout.stage_count or own.pp_schedule not in SCHEDULES:
        return
    held += own.pp_first_stage_less + own.pp_last_stage_less
    counts = {-(-held // layers): layers for layers in range(held // own.pp, 0, -1)}
    valid = sorted(count for count in {*counts, layout.stage_count} if count % own.pp == 0 and count > own.pp)
    yield from (counts[count] for _, count in _beside(layout.stage_count, valid))


def _loss_chunks(layout: ResolvedLayout) -> Iterator[tuple[int, int | str]]:
    """Half and twice the tokens of a chunk of logits."""
    tokens = layout.micro_batch_size * layout.training.seq_len // layout.parallelism.cp
    if layout.loss_chunk_tokens is None:
        return
    chunk = min(tokens, layout.loss_chunk_tokens)
    fewer, more = [chunk // 2] * (chunk >= 2 * LEAST_CHUNK), [min(2 * chunk, tokens)] * (chunk < tokens)
    for other in (*fewer, *more):
        yield other - chunk, "auto" if other == min(tokens, LOSS_CHUNK_TOKENS) else other
