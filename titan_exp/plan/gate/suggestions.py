"""Suggestions for a run that does not fit: the cheapest moves and their combinations, each predicted.

Moves with an insufficient best case, estimated from the breakdown of the peak, are not predicted.
"""

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError, shown
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.plan.gate.gate import MemoryCheck, check_memory, explain_oom, explain_retries, staged
from titan_exp.plan.search.layouts import LOSS_CHUNK, MICRO_BATCH, MODE, Move, further_moves, moves, with_values
from titan_exp.rules import check
from titan_exp.tracking.number_format import format_bytes

MAX_SUGGESTIONS = 3
TIME_LIMIT = 60.0
"""Time limit in seconds; no further combination is predicted after it."""
BATCH = 2
"""Number of combinations predicted together."""
COPY = "copy of the state"
"""Category of what an asynchronous save holds on a CPU."""
RECOMPUTATION = {"selective": (2.0, 0.25), "full": (5.0, 0.02)}
"""Cost and best-case factor of activations, by suggested value of activation_checkpoint.mode."""
OF_MICRO_BATCH = ("activations", "loss", "communication", "other")
"""Memory categories in proportion to the size of micro-batches."""
SHARDED = ("parameters", "gradients", "optimizer")
"""Memory categories divided by the number of shards."""


@dataclass(frozen=True)
class Offer:
    """Move that saves memory; the default is none."""

    move: Move | None = None
    option: str = ""
    """Key of the move, or `parallelism`: a suggestion has one move of each option."""
    cost: float = 0.0
    """Cost in speed, numerics or devices, in a unit that only orders offers."""
    categories: tuple[str, ...] | None = ()
    """Memory categories that shrink; None is all."""
    factor: float = 1.0
    """Best-case factor of these categories."""


@dataclass(frozen=True)
class Suggestion:
    """Moves that make the run fit."""

    overrides: tuple[str, ...]
    memory_check: MemoryCheck


def suggestions(memory_check: MemoryCheck, runs: Path, say: Callable[[str], None] = lambda _: None) -> list[Suggestion]:
    """Suggest the cheapest moves that fit, each predicted; empty if none is found in time."""
    began, found, chosen = time.monotonic(), list[Suggestion](), list[tuple[int, ...]]()
    say("It does not fit; looking for changes that would ...")
    candidates = _candidates(memory_check)
    while len(found) < MAX_SUGGESTIONS and time.monotonic() - began < TIME_LIMIT:
        # Skip supersets of a suggestion.
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
        best += size * math.prod(offer.factor for offer in shrinking)
    needed = memory_check.needed or 0
    return (needed - overhead) * best / sum(sizes.values()) + overhead <= (memory.capacity or 0)


def _offers(memory_check: MemoryCheck) -> Iterator[Offer]:
    """Moves that save memory, with their costs and best cases."""
    run = memory_check.experiment
    layout, on_cpu = ResolvedLayout.of(run), ResolvedLayout.of(run).device_type == "cpu"
    now, tokens = layout.micro_batch_size, layout.micro_batch_size * layout.training.seq_len
    for move in (*moves(run), *further_moves(run)):
        key, value = next(iter(move.values.items()))
        if key == MODE and move.direction < 0 and value in RECOMPUTATION:
            cost, factor = RECOMPUTATION[value]
            yield Offer(move, key, cost, ("activations",), factor)
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
    more = {key.partition(".")[2] for key, value in move.values.items() if value > _value(run, key)}
    if move.values.keys() == {"parallelism.dp_shard"}:
        factor = move.values["parallelism.dp_shard"] // own.dp_shard
        # An unset micro-batch size follows from the data-parallel degree.
        sharded = (*SHARDED, "activations", "loss") if run.training.micro_batch_size is None else SHARDED
        return Offer(move, option, 8.0 * math.log2(factor), sharded, 1 / factor)
    halves = move.values.get("parallelism.dp_shard") == own.dp_shard // 2
    if more <= {"tp", "pp"} and more and (halves or len(move.values) == 1):
        return Offer(move, option, 6.0 if halves else 10.0, None, 0.5)
    return None


def _value(run: Experiment, key: str) -> Any:
    group, _, name = key.partition(".")
    return getattr(getattr(run, group), name)


def _contains(levels: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """True if a combination has every change of another, or a stronger one."""
    return all(level >= than for level, than in zip(levels, other, strict=True))


def _override(key: str, value: object) -> str:
    return f"activation_checkpoint={value}" if key == "activation_checkpoint.mode" else f"{key}={shown(value)}"
