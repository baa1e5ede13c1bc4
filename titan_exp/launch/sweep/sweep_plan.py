"""Sweep plan: every point is composed, checked and predicted before any run starts."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from titan_exp.config.errors.explain_hydra import explain_point
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.study.points import Point
from titan_exp.launch import memory_gate
from titan_exp.launch.run_plan import RunPlan, plan_run
from titan_exp.plan.gate import MemoryCheck
from titan_exp.tracking.display import format_items


@dataclass(frozen=True)
class PlannedPoint:
    """Point that can run."""

    point: Point
    plan: RunPlan
    memory_check: MemoryCheck | None = None  # memory check; None before the check, and for finished runs

    @property
    def path(self) -> Path:
        """Run folder."""
        return self.plan.folder.path


@dataclass(frozen=True)
class SkippedPoint:
    """Point that does not run, with the reason."""

    point: Point
    reason: str


@dataclass(frozen=True)
class SweepPlan:
    """Planned and skipped points of a sweep."""

    planned: tuple[PlannedPoint, ...] = ()  # one point per run
    duplicates: tuple[PlannedPoint, ...] = ()  # further points that share these runs
    skipped: tuple[SkippedPoint, ...] = ()

    def __add__(self, more: "SweepPlan") -> "SweepPlan":
        return SweepPlan(self.planned + more.planned, self.duplicates + more.duplicates, self.skipped + more.skipped)


def plan_sweep(
    points: Sequence[Point], compose: Callable[[Point], Experiment], *, skip: bool, where: str = "of the sweep"
) -> SweepPlan:
    """Plan every point; `compose` raises UserError for an invalid point. With `skip`, points that break a rule are left
    out. Raises one UserError that lists all points that cannot run, or if no point is left; `where` follows "n points".
    """
    planned, opened = dict[object, PlannedPoint](), set[str]()
    duplicates, skipped, refused = list[PlannedPoint](), list[SkippedPoint](), list[tuple[Point, UserError]]()
    for point in points:
        if point.excluded is not None:
            skipped.append(SkippedPoint(point, point.excluded))
            continue
        experiment = None
        try:
            experiment = compose(point)
            entry = PlannedPoint(point, plan_run(experiment, point.overrides, opened=opened))
        except UserError as error:
            if skip and experiment is not None:
                reason = "\n".join(str(violation) for violation in error.violations)
                skipped.append(SkippedPoint(point, reason or str(error)))
            else:
                refused.append((point, error))
            continue
        if planned.setdefault(entry.path, entry) is not entry:
            duplicates.append(entry)
    if refused:
        # Points with one cause share an explanation, for which Hydra composes several times.
        causes = {error.__cause__ or error: (error, point.overrides) for point, error in reversed(refused)}
        explained = {cause: explain_point(*first) for cause, first in causes.items()}
        reasons = [SkippedPoint(point, explained[error.__cause__ or error]) for point, error in refused]
        raise cannot_run(f"{format_items(len(refused), 'point')} {where} cannot run, so nothing has started.", reasons)
    if not planned:
        raise cannot_run(f"None of the {len(points)} points {where} can run here.", skipped)
    return SweepPlan(tuple(planned.values()), tuple(duplicates), tuple(skipped))


def cannot_run(headline: str, points: Iterable[SkippedPoint], *hints: str) -> UserError:
    """Build a UserError that lists points by reason."""
    return UserError("\n".join([headline, *reasons_with_points(points), *hints]))


NAMED = 3


def reasons_with_points(skipped: Iterable[SkippedPoint]) -> list[str]:
    """Lines of each reason, with the number of its points and the labels of the first below."""
    lines, labels = list[str](), dict[str, list[str]]()
    for entry in skipped:
        labels.setdefault(entry.reason, []).append(entry.point.label)
    for reason, found in labels.items():
        named = ", ".join(f"[{label}]" for label in found[:NAMED])
        more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
        lines += [f"  {line}" for line in reason.splitlines()]
        lines.append(f"    {format_items(len(found), 'point')}: {named}{more}")
    return lines


def predict_sweep_memory(
    sweep_plan: SweepPlan, echo: memory_gate.Echo, *, skip: bool, where: str = "of the sweep"
) -> SweepPlan:
    """Add memory predictions to a sweep plan, and skip points that do not fit. Raises UserError without `skip`, or if
    no point is left; `where` follows "n points"."""
    memory_checks = memory_gate.check_open_runs([entry.plan for entry in sweep_plan.planned], echo)
    kept: list[PlannedPoint] = []
    refused: dict[Path, str] = {}
    for entry, memory_check in zip(sweep_plan.planned, memory_checks, strict=True):
        if memory_check is None:
            kept.append(entry)
        elif reason := memory_gate.refusal(memory_check):
            refused[entry.path] = reason
        else:
            plan = memory_gate.with_prediction(entry.plan, memory_check)
            kept.append(replace(entry, plan=plan, memory_check=memory_check))
    for line in memory_gate.gate_warnings([entry.memory_check for entry in kept if entry.memory_check is not None]):
        echo(line)
    if not refused:
        return replace(sweep_plan, planned=tuple(kept))
    entries = [entry for entry in sweep_plan.planned + sweep_plan.duplicates if entry.path in refused]
    skipped = [SkippedPoint(entry.point, refused[entry.path]) for entry in entries]
    if not skip or not kept:
        none = "so nothing has started" if kept else "and no other is left"
        headline = f"{format_items(len(skipped), 'point')} {where} cannot run, {none}."
        raise cannot_run(headline, skipped, memory_gate.GATE_HINT)
    duplicates = tuple(entry for entry in sweep_plan.duplicates if entry.path not in refused)
    return SweepPlan(tuple(kept), duplicates, (*sweep_plan.skipped, *skipped))
