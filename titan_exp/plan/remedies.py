"""What would make a run fit: single changes first, then pairs, the cheapest first, each tried by planning it."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from titan_exp.config.errors import UserError, shown
from titan_exp.config.experiment import Experiment
from titan_exp.config.layout import device_type, micro_batch_size
from titan_exp.config.rules import check
from titan_exp.config.suggest import divisors
from titan_exp.plan.gate import Judgement, judge

ENOUGH = 3
"""Changes that are offered at most."""
SECONDS = 45.0
"""After which no further change is tried."""
TOGETHER = 2
"""Changes that are tried at a time."""
LOSS_CHUNK = 2048
"""Tokens whose logits are held at a time, where the loss in chunks is tried."""


@dataclass(frozen=True)
class Change:
    """Overrides that change how the same thing is computed, or on how many devices."""

    overrides: tuple[str, ...]
    """As typed."""
    experiment: Experiment
    """The run with them."""


@dataclass(frozen=True)
class Remedy:
    """A change that makes the run fit."""

    change: Change
    """The change."""
    judgement: Judgement
    """What was predicted of it."""


def remedies(experiment: Experiment, runs: Path, say: Callable[[str], None] = lambda _: None) -> list[Remedy]:
    """The cheapest changes that would fit, each planned; empty where none was found in time.

    Args:
        experiment: a run that does not fit, its layout resolved.
        runs: `paths.runs`.
        say: takes a line before what takes seconds.
    """
    began, found = time.monotonic(), list[Remedy]()
    say("It does not fit; looking for changes that would ...")
    queue = iter([*changes(experiment), *_pairs(experiment)])
    while len(found) < ENOUGH and time.monotonic() - began < SECONDS:
        batch = list(itertools.islice(queue, TOGETHER))
        if not batch:
            break
        judged = judge([change.experiment for change in batch], runs)
        found += [Remedy(change, it) for change, it in zip(batch, judged, strict=True) if it.fits and not it.tight]
    return found[:ENOUGH]


def changes(experiment: Experiment) -> Iterator[Change]:
    """Single changes that save memory and keep every rule, those that cost least first."""
    for overrides in _candidates(experiment):
        change = _changed(experiment, overrides)
        if change is not None:
            yield change


def _candidates(experiment: Experiment) -> Iterator[tuple[tuple[str, object], ...]]:
    training, parallelism = experiment.training, experiment.parallelism
    tokens = micro_batch_size(experiment) * training.seq_len
    if training.loss_chunk_tokens is None and tokens > LOSS_CHUNK:
        yield (("training.loss_chunk_tokens", LOSS_CHUNK),)
    if experiment.activation_checkpoint.mode == "none":
        yield (("activation_checkpoint.mode", "selective"),)
    smaller = [size for size in divisors(micro_batch_size(experiment)) if size < micro_batch_size(experiment)]
    if smaller:
        yield (("training.micro_batch_size", smaller[-1]),)
    if len(smaller) > 1:
        yield (("training.micro_batch_size", smaller[0]),)
    if experiment.activation_checkpoint.mode != "full":
        yield (("activation_checkpoint.mode", "full"),)
    if experiment.optimizer.state_precision == "fp32":
        yield (("optimizer.state_precision", "int8"),)
    if device_type(experiment.cluster) == "cuda":
        for factor in (2, 4):
            yield (("parallelism.dp_shard", parallelism.dp_shard * factor),)
        # The same devices, divided otherwise, before more of them.
        for key, degree in (("tp", parallelism.tp), ("pp", parallelism.pp)):
            if parallelism.dp_shard % 2 == 0:
                yield ((f"parallelism.{key}", degree * 2), ("parallelism.dp_shard", parallelism.dp_shard // 2))
            yield ((f"parallelism.{key}", degree * 2),)


def _pairs(experiment: Experiment) -> Iterator[Change]:
    """Two or three changes together, where one alone is not enough."""
    singles = list(_candidates(experiment))
    full = [it for it in singles if it == (("activation_checkpoint.mode", "full"),)]
    chunk = [it for it in singles if it[0][0] == "training.loss_chunk_tokens"]
    least = [it for it in singles if it[0][0] == "training.micro_batch_size"][-1:]
    moments = [it for it in singles if it[0][0] == "optimizer.state_precision"]
    shards = [it for it in singles if it[0][0] == "parallelism.dp_shard"]
    base = [*full, *least, *chunk]
    for together in (base, [*base, *moments], [*base, *shards[:1]], [*base, *moments, *shards[1:2]]):
        flat = tuple(pair for change in together for pair in change)
        if len(together) > 1 and (change := _changed(experiment, flat)) is not None:
            yield change


def _changed(experiment: Experiment, overrides: Sequence[tuple[str, object]]) -> Change | None:
    """The experiment with a change; None where a rule forbids it."""
    changed = experiment
    for key, value in overrides:
        group, _, name = key.partition(".")
        changed = replace(changed, **{group: replace(getattr(changed, group), **{name: value})})
    try:
        check(changed)
    except UserError:
        return None
    typed = (
        f"activation_checkpoint={value}" if key.endswith(".mode") else f"{key}={shown(value)}"
        for key, value in overrides
    )
    return Change(tuple(typed), changed)
