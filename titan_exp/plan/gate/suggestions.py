"""What would make a run fit: the cheapest changes, alone and together, each tried by planning it.

A rough best case, computed from what the peak is made of, leaves out changes that cannot be enough; whatever is offered
has been planned.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from titan_exp.config.errors.did_you_mean import divisors
from titan_exp.config.errors.user_error import UserError, shown
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.optimizer import keeps_fp32_moments
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.machine.devices import device_type
from titan_exp.plan.gate.gate import MemoryCheck, check_memory
from titan_exp.rules import check

ENOUGH = 3
"""Changes that are offered at most."""
SECONDS = 60.0
"""After which no further change is tried."""
TOGETHER = 2
"""Changes that are tried at a time."""
LOSS_CHUNK = 2048
"""Tokens whose logits are held at a time, where the loss in chunks is tried."""
SHARDED = ("parameters", "gradients", "optimizer")
"""Categories of memory that sharding over more devices divides."""


@dataclass(frozen=True)
class Choice:
    """One place on an axis of changes; place 0 changes nothing, and those after it save more."""

    overrides: tuple[tuple[str, object], ...] = ()
    """Keys and values."""
    cost: float = 0.0
    """What it costs in speed, numerics or devices, in a unit that only orders changes."""
    left: Callable[[str], float] = lambda _: 1.0
    """By category of memory: the share that is left at best."""


@dataclass(frozen=True)
class Suggestion:
    """A change that makes the run fit."""

    overrides: tuple[str, ...]
    """As typed."""
    memory_check: MemoryCheck
    """What was predicted of it."""


def suggestions(memory_check: MemoryCheck, runs: Path, say: Callable[[str], None] = lambda _: None) -> list[Suggestion]:
    """The cheapest changes that would fit, each planned; empty where none was found in time.

    Args:
        judgement: of a run that does not fit.
        runs: `paths.runs`.
        say: takes a line before what takes seconds.
    """
    began, found, places = time.monotonic(), list[Suggestion](), list[tuple[int, ...]]()
    say("It does not fit; looking for changes that would ...")
    queue = _changed(memory_check)
    while len(found) < ENOUGH and time.monotonic() - began < SECONDS:
        # More of what is enough already is no further offer.
        fresh = (it for it in queue if not any(_is_more(it[0], place) for place in places))
        batch = list(itertools.islice(fresh, TOGETHER))
        if not batch:
            break
        memory_checks = check_memory([experiment for _, _, experiment in batch], runs)
        for (place, typed, _), it in zip(batch, memory_checks, strict=True):
            if it.fits and not any(_is_more(place, other) for other in places):
                found.append(Suggestion(typed, it))
                places.append(place)
    return found[:ENOUGH]


def axes(experiment: Experiment) -> list[list[Choice]]:
    """What may be changed without changing what is learned, each from nothing to the most."""
    found = [_chunks(experiment), _recomputation(experiment), _micro_batches(experiment), _moments(experiment)]
    return [*found, _devices(experiment)] if device_type(experiment.cluster) == "cuda" else found


def _changed(memory_check: MemoryCheck) -> Iterator[tuple[tuple[int, ...], tuple[str, ...], Experiment]]:
    """Combinations that may be enough and keep every rule, the cheapest first, with their places on the axes."""
    there = axes(memory_check.experiment)
    combinations = itertools.product(*(range(len(axis)) for axis in there))
    for place in sorted(combinations, key=lambda it: sum(there[axis][at].cost for axis, at in enumerate(it))):
        chosen = [there[axis][at] for axis, at in enumerate(place)]
        if not any(place) or not _may_be_enough(memory_check, chosen):
            continue
        overrides = tuple(pair for choice in chosen for pair in choice.overrides)
        changed = memory_check.experiment
        for key, value in overrides:
            group, _, name = key.partition(".")
            changed = replace(changed, **{group: replace(getattr(changed, group), **{name: value})})
        try:
            check(changed)
        except UserError:
            continue
        yield place, tuple(_typed(key, value) for key, value in overrides), changed


def _may_be_enough(memory_check: MemoryCheck, chosen: list[Choice]) -> bool:
    prediction, device_memory = memory_check.prediction, memory_check.device_memory
    assert prediction is not None, "it was found not to fit"
    assert device_memory is not None, "it was found not to fit"
    largest, needed = prediction.largest, memory_check.needed or 0
    left = sum(
        size * math.prod(choice.left(category) for choice in chosen) for category, size in largest.by_category.items()
    )
    beside = device_memory.overhead * device_memory.sharing
    return (needed - beside) * left / largest.allocated + beside <= (device_memory.capacity or 0)


def _chunks(experiment: Experiment) -> list[Choice]:
    tokens = ResolvedLayout.of(experiment).micro_batch_size * experiment.training.seq_len
    if experiment.training.loss_chunk_tokens is not None or tokens <= LOSS_CHUNK:
        return [Choice()]
    left = _of(("loss",), LOSS_CHUNK / tokens)
    return [Choice(), Choice((("training.loss_chunk_tokens", LOSS_CHUNK),), 1.0, left)]


def _recomputation(experiment: Experiment) -> list[Choice]:
    mode = experiment.activation_checkpoint.mode
    key, kept = "activation_checkpoint.mode", ("activations",)
    found = [Choice()]
    if mode == "none":
        found.append(Choice(((key, "selective"),), 2.0, _of(kept, 0.25)))
    if mode != "full":
        found.append(Choice(((key, "full"),), 5.0, _of(kept, 0.02)))
    return found


def _micro_batches(experiment: Experiment) -> list[Choice]:
    now = ResolvedLayout.of(experiment).micro_batch_size
    found = [Choice()]
    for size in reversed([size for size in divisors(now) if size < now]):
        left = _of(("activations", "loss", "communication", "other"), size / now)
        cost = 1.0 + 0.5 * math.log2(now / size)
        found.append(Choice((("training.micro_batch_size", size),), cost, left))
    return found


def _moments(experiment: Experiment) -> list[Choice]:
    if not keeps_fp32_moments(experiment.optimizer):
        return [Choice()]
    return [Choice(), Choice((("optimizer.state_precision", "int8"),), 4.0, _of(("optimizer",), 0.28))]


def _devices(experiment: Experiment) -> list[Choice]:
    """The same devices divided otherwise, or more of them."""
    parallelism, found = experiment.parallelism, [Choice()]
    # A rank's share of the batch is smaller as well where that follows from the degree.
    follows = experiment.training.micro_batch_size is None
    for factor in (2, 4):
        divided = (*SHARDED, "activations", "loss") if follows else SHARDED
        overrides = (("parallelism.dp_shard", parallelism.dp_shard * factor),)
        found.append(Choice(overrides, 8.0 * math.log2(factor), _of(divided, 1 / factor)))
    for key, degree in (("tp", parallelism.tp), ("pp", parallelism.pp)):
        degrees: tuple[tuple[str, object], ...] = ((f"parallelism.{key}", degree * 2),)
        if parallelism.dp_shard % 2 == 0:
            narrower = ("parallelism.dp_shard", parallelism.dp_shard // 2)
            found.append(Choice((*degrees, narrower), 6.0, lambda _: 0.5))
        found.append(Choice(degrees, 10.0, lambda _: 0.5))
    return found


def _of(categories: tuple[str, ...], share: float) -> Callable[[str], float]:
    return lambda category: share if category in categories else 1.0


def _is_more(place: tuple[int, ...], than: tuple[int, ...]) -> bool:
    """Whether a combination has all that another has, or more of it."""
    return all(here >= there for here, there in zip(place, than, strict=True))


def _typed(key: str, value: object) -> str:
    return f"activation_checkpoint={value}" if key == "activation_checkpoint.mode" else f"{key}={shown(value)}"
