"""Cases of a layout check: one rank, each axis that a run asks for at degree 2, and each pair of them."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.axes import world_size
from titan_exp.config.layout.pipeline_schedules import SCHEDULES
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.rules import violations

MOST_RANKS = 4  # maximum number of ranks of a case: a pair of axes


@dataclass(frozen=True)
class Axis:
    """What a run asks for beside one rank with all rows at once."""

    name: str
    changes: Mapping[str, Any]  # changes of the shrunken run, by key
    without: str  # override with which a run no longer asks for it; empty if there is none

    @property
    def has_ranks(self) -> bool:
        """True if several ranks share the work."""
        return any(key.startswith("parallelism.") for key in self.changes)


@dataclass(frozen=True)
class Case:
    """A shrunken run in one layout."""

    axes: tuple[Axis, ...]  # axes that it differs by from one rank; empty for that one
    experiment: Experiment  # shrunken run with a resolved layout

    @property
    def name(self) -> str:
        """Name in messages."""
        return " with ".join(axis.name for axis in self.axes) or "one rank"

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return world_size(self.experiment.parallelism)


@dataclass(frozen=True)
class Verdict:
    """Verdict of a layout check."""

    difference: str = ""  # explanation of what differs from one rank; empty if nothing does
    remedies: tuple[str, ...] = ()  # overrides without which the run asks for no layout that differs
    agreeing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # sentences about what was not checked, and about documents that see each other
    seconds: float = 0.0


def asked_axes(run: Experiment) -> list[Axis]:
    """Axes that a run with a resolved layout asks for."""
    own, found = run.parallelism, list[Axis]()
    for key in ("dp_shard", "dp_replicate", "tp", "cp", "pp"):
        if getattr(own, key) == 1:
            continue
        name, without = f"parallelism.{key}=2", f"parallelism.{key}=1"
        changes: dict[str, Any] = {f"parallelism.{key}": 2}
        match key:
            case "pp":
                known = own.pp_schedule if own.pp_schedule in SCHEDULES else "1F1B"
                changes |= {"training.micro_batch_size": 1, "parallelism.pp_schedule": known}
            case "cp" if own.cp_method != "ulysses":
                changes["parallelism.cp_ulysses"] = 1
            case "tp":
                name += f" parallelism.sequence_parallel={str(own.sequence_parallel).lower()}"
                changes["parallelism.etp"] = min(own.etp, 2)
                without = "parallelism.sequence_parallel=false" if own.sequence_parallel else without
            case "dp_shard" | "dp_replicate" if run.training.micro_batch_size is not None:
                without = ""  # one rank would have more micro-batches
        found.append(Axis(name, changes, without))
    if own.ep > 1:
        # Experts take the ranks of another axis, in the order of the trainer's mesh.
        beside = next(key for key in ("tp", "cp", "dp_shard") if getattr(own, key) > 1)
        changes = {f"parallelism.{beside}": 2, "parallelism.ep": 2}
        found.append(Axis(f"parallelism.ep=2 parallelism.{beside}=2", changes, "parallelism.ep=1"))
    if ResolvedLayout.of(run).gradient_accumulation > 1:
        found.append(Axis("training.micro_batch_size=1", {"training.micro_batch_size": 1}, ""))
    if run.activation_checkpoint.mode not in ("none", "budget"):
        changes = {"activation_checkpoint": run.activation_checkpoint}
        name = f"activation_checkpoint={run.activation_checkpoint.mode}"
        found.append(Axis(name, changes, "activation_checkpoint=none"))
    return found


def cases(run: Experiment, small: Experiment) -> tuple[list[Case], list[str]]:
    """Cases of a run and its shrunken one: one rank, axes, pairs; and sentences about those that rules refuse."""
    axes, found, refused = asked_axes(run), [Case((), _changed(small, {}))], list[str]()
    # Rules about the data of the real run, such as the size of its vocabulary, refuse any shrunken one.
    beside = {(each.field, each.reason) for each in violations(found[0].experiment)}
    for chosen in _combinations(axes):
        changes: dict[str, Any] = {}
        for axis in chosen:
            changes |= axis.changes
        case = Case(chosen, _changed(small, changes))
        if case.ranks > MOST_RANKS or any(case.experiment == other.experiment for other in found):
            continue
        wrong = [each for each in violations(case.experiment) if (each.field, each.reason) not in beside]
        if wrong:
            refused.append(f"{case.name}: {wrong[0].reason}")
        else:
            found.append(case)
    return found, refused


def _combinations(axes: Sequence[Axis]) -> Iterator[tuple[Axis, ...]]:
    """Each axis, each pair of axes with ranks, and each of those with all that a rank does by itself."""
    with_ranks = [axis for axis in axes if axis.has_ranks]
    alone = tuple(axis for axis in axes if not axis.has_ranks)
    yield from ((axis,) for axis in axes)
    yield from itertools.combinations(with_ranks, 2)
    if alone:
        yield from ((axis, *alone) for axis in with_ranks)
    if len(alone) > 1:
        yield alone


def _changed(small: Experiment, changes: Mapping[str, Any]) -> Experiment:
    found = small
    for key, value in changes.items():
        group, _, name = key.partition(".")
        found = replace(found, **{group: replace(getattr(found, group), **{name: value}) if name else value})
    own = found.parallelism
    share = small.training.global_batch_size // (own.dp_replicate * own.dp_shard)
    rows = min(found.training.micro_batch_size or share, share)
    return replace(found, training=replace(found.training, micro_batch_size=rows))
