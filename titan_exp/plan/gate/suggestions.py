"""Suggestions for a run that does not fit: the cheapest option changes and their combinations, each predicted.

Changes with an insufficient best case, estimated from the breakdown of the peak, are not predicted.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from titan_exp.config.errors.user_error import UserError, divisors, shown
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.optimizer import keeps_fp32_moments
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.plan.gate.gate import MemoryCheck, check_memory, explain_oom, explain_retries, staged
from titan_exp.rules import check
from titan_exp.tracking.number_format import format_bytes

MAX_SUGGESTIONS = 3
TIME_LIMIT = 60.0
"""Time limit in seconds; no further change is predicted after it."""
BATCH = 2
"""Number of changes predicted together."""
LOSS_CHUNK = 2048
"""Suggested value of training.loss_chunk_tokens."""
COPY = "copy of the state"
"""Category of what an asynchronous save holds on a CPU."""
RECOMPUTATION = (("selective", 2.0, 0.25), ("full", 5.0, 0.02))
"""Suggested values of activation_checkpoint.mode, with their costs and best-case factors of activations."""
OF_MICRO_BATCH = ("activations", "loss", "communication", "other")
"""Memory categories in proportion to the size of micro-batches."""
SHARDED = ("parameters", "gradients", "optimizer")
"""Memory categories divided by the number of shards."""


@dataclass(frozen=True)
class Change:
    """Values of keys; the default is no change. Later ones of an option save more."""

    overrides: Mapping[str, object] = field(default_factory=dict)
    cost: float = 0.0
    """Cost in speed, numerics or devices, in a unit that only orders changes."""
    categories: tuple[str, ...] | None = ()
    """Memory categories that shrink; None is all."""
    factor: float = 1.0
    """Best-case factor of these categories."""


@dataclass(frozen=True)
class Suggestion:
    """A change that makes the run fit."""

    overrides: tuple[str, ...]
    memory_check: MemoryCheck


def suggestions(memory_check: MemoryCheck, runs: Path, say: Callable[[str], None] = lambda _: None) -> list[Suggestion]:
    """Suggest the cheapest changes that fit, each predicted; empty if none is found in time."""
    began, found, chosen = time.monotonic(), list[Suggestion](), list[tuple[int, ...]]()
    say("It does not fit; looking for changes that would ...")
    candidates = _candidates(memory_check)
    while len(found) < MAX_SUGGESTIONS and time.monotonic() - began < TIME_LIMIT:
        # Skip supersets of a suggested change.
        fresh = (candidate for candidate in candidates if not any(_contains(candidate[0], other) for other in chosen))
        batch = list(itertools.islice(fresh, BATCH))
        if not batch:
            break
        checks = check_memory([experiment for _, _, experiment in batch], runs)
        for (levels, overrides, _), changed in zip(batch, checks, strict=True):
            if changed.fits and not any(_contains(levels, other) for other in chosen):
                found.append(Suggestion(overrides, changed))
                chosen.append(levels)
    return found[:MAX_SUGGESTIONS]


def explain_changes(memory_check: MemoryCheck, runs: Path, say: Callable[[str], None] = lambda _: None) -> str:
    """Why a run does not fit, and the changes with which it would."""
    found = suggestions(memory_check, runs, say)
    lines = [f"This run does not fit: {explain_oom(memory_check)}"]
    if found:
        lines.append("  Predicted to fit:")
        width = max(len(" ".join(suggestion.overrides)) for suggestion in found)
        lines += [f"    {' '.join(suggestion.overrides):{width}}  {_outcome(suggestion)}" for suggestion in found]
    else:
        lines.append("  None of the tried changes fits; use a smaller model or shorter sequences.")
    return "\n".join(lines)


def _outcome(suggestion: Suggestion) -> str:
    memory_check = suggestion.memory_check
    if memory_check.prediction is None:
        return "fits by an upper bound"
    prediction, memory = memory_check.planned
    together = f"{format_bytes(memory_check.needed or 0)} together" if memory.sharing > 1 else ""
    peak = format_bytes(memory_check.process_bytes(prediction.largest))
    return ", ".join(filter(None, (peak, explain_retries(memory_check), together)))


def _candidates(memory_check: MemoryCheck) -> Iterator[tuple[tuple[int, ...], tuple[str, ...], Experiment]]:
    """Combinations that may fit and break no rule, cheapest first, each with its level per option."""
    options = [enumerate([Change(), *changes]) for changes in _changes(memory_check)]
    for combination in sorted(itertools.product(*options), key=lambda found: sum(change.cost for _, change in found)):
        levels, changes = zip(*combination, strict=True)
        if not any(levels) or not _may_fit(memory_check, changes):
            continue
        overrides = {key: value for change in changes for key, value in change.overrides.items()}
        changed = memory_check.experiment
        for key, value in overrides.items():
            group, _, name = key.partition(".")
            changed = replace(changed, **{group: replace(getattr(changed, group), **{name: value})})
        with suppress(UserError):
            check(changed)
            yield levels, tuple(_override(key, value) for key, value in overrides.items()), changed


def _may_fit(memory_check: MemoryCheck, changes: Sequence[Change]) -> bool:
    prediction, memory = memory_check.planned
    largest, overhead = prediction.largest, memory.overhead * memory.sharing
    sizes = {**largest.by_category, COPY: staged(memory_check.experiment, largest)}
    best = 0.0
    for name, size in sizes.items():
        shrinking = (change for change in changes if change.categories is None or name in change.categories)
        best += size * math.prod(change.factor for change in shrinking)
    needed = memory_check.needed or 0
    return (needed - overhead) * best / sum(sizes.values()) + overhead <= (memory.capacity or 0)


def _changes(memory_check: MemoryCheck) -> Iterator[list[Change]]:
    """Changes of every option that has any."""
    experiment, layout = memory_check.experiment, ResolvedLayout.of(memory_check.experiment)
    now, mode = layout.micro_batch_size, experiment.activation_checkpoint.mode
    tokens = now * layout.training.seq_len
    if not layout.training.has_given_chunks and tokens > LOSS_CHUNK:
        yield [Change({"training.loss_chunk_tokens": LOSS_CHUNK}, 1.0, ("loss",), LOSS_CHUNK / tokens)]
    stronger = RECOMPUTATION if mode == "none" else RECOMPUTATION[1:] if mode != "full" else ()
    yield [Change({"activation_checkpoint.mode": name}, cost, ("activations",), kept) for name, cost, kept in stronger]
    yield [
        Change({"training.micro_batch_size": size}, 1.0 + 0.5 * math.log2(now / size), OF_MICRO_BATCH, size / now)
        for size in reversed(divisors(now)[:-1])
    ]
    if keeps_fp32_moments(experiment.optimizer):
        yield [Change({"optimizer.state_precision": "int8"}, 4.0, ("optimizer",), 0.28)]
    if staged(experiment, memory_check.planned[0].largest):
        yield [Change({"checkpoint.mode": "sync"}, 0.5, (COPY,), 0.0)]
    yield list(_degrees(layout))


def _degrees(layout: ResolvedLayout) -> Iterator[Change]:
    """Other degrees for the same number of GPUs, or more GPUs."""
    if layout.device_type == "cpu":
        return
    parallelism = layout.parallelism
    # An unset micro-batch size follows from the data-parallel degree.
    sharded = (*SHARDED, "activations", "loss") if layout.training.micro_batch_size is None else SHARDED
    for factor in (2, 4):
        override = {"parallelism.dp_shard": parallelism.dp_shard * factor}
        yield Change(override, 8.0 * math.log2(factor), sharded, 1 / factor)
    for key, degree in (("tp", parallelism.tp), ("pp", parallelism.pp)):
        override = {f"parallelism.{key}": degree * 2}
        if parallelism.dp_shard % 2 == 0:
            yield Change({**override, "parallelism.dp_shard": parallelism.dp_shard // 2}, 6.0, None, 0.5)
        yield Change(override, 10.0, None, 0.5)


def _contains(levels: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """True if a combination has every change of another, or a stronger one."""
    return all(level >= than for level, than in zip(levels, other, strict=True))


def _override(key: str, value: object) -> str:
    return f"activation_checkpoint={value}" if key == "activation_checkpoint.mode" else f"{key}={shown(value)}"
