"""The plan of a sweep: every point composed, checked and named before any is started. Nothing is written."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.launch.run_plan import RunPlan, plan_run
from titan_exp.plan.gate.gate import MemoryCheck


@dataclass(frozen=True)
class Point:
    """One combination of values."""

    overrides: tuple[str, ...]
    """Everything that it sets, with one value for each key."""
    label: str
    """Varied values only."""
    variant: str = ""
    """The label without the seed, in a study."""
    seed: int | None = None
    """The seed, if the study gives seeds."""
    excluded: str | None = None
    """Reason for which the study excludes the point."""


@dataclass(frozen=True)
class PlannedPoint:
    """A point that may be started."""

    point: Point
    """The first point of this run."""
    plan: RunPlan
    """Plan of the run."""
    memory_check: MemoryCheck | None = None
    """Memory check; None before the check, and for runs that are done."""


@dataclass(frozen=True)
class SkippedPoint:
    """A point that is not started."""

    point: Point
    """The point."""
    reason: str
    """Why, in the words of the rule or of the study."""


@dataclass(frozen=True)
class SweepPlan:
    """Planned and skipped points of a sweep."""

    planned: tuple[PlannedPoint, ...]
    """Every run once."""
    duplicates: tuple[PlannedPoint, ...]
    """Further points of these runs: they compute the same."""
    skipped: tuple[SkippedPoint, ...]
    """Points that cannot run, and those that the study excludes."""


def plan_sweep(
    points: Sequence[Point], compose: Callable[[Point], Experiment], *, skip: bool, where: str = "of the sweep"
) -> SweepPlan:
    """A plan for every point that is not the same run as one before it.

    Args:
        points: the combinations.
        compose: makes a point's configuration; raises UserError where that cannot be read.
        skip: leave out points that a rule forbids; without, one of them refuses the sweep.
        where: ends "n point(s) ..." in what is said of mistakes.

    Raises:
        UserError: points cannot be read or, without `skip`, cannot run; or none is left. It names all of them.
    """
    planned: dict[object, PlannedPoint] = {}
    duplicates: list[PlannedPoint] = []
    skipped: list[SkippedPoint] = []
    refused: dict[str, list[Point]] = {}
    for point in points:
        if point.excluded is not None:
            skipped.append(SkippedPoint(point, point.excluded))
            continue
        try:
            experiment = compose(point)
        except UserError as error:
            refused.setdefault(str(error), []).append(point)
            continue
        try:
            planned_point = PlannedPoint(point, plan_run(experiment, point.overrides))
        except UserError as error:
            if skip:
                said = "\n".join(str(violation) for violation in error.violations)
                skipped.append(SkippedPoint(point, said or str(error)))
            else:
                refused.setdefault(str(error), []).append(point)
            continue
        if planned.setdefault(planned_point.plan.folder.path, planned_point) is not planned_point:
            duplicates.append(planned_point)
    if refused:
        count = sum(map(len, refused.values()))
        lines = [f"{count} point(s) {where} cannot run, so none was started.", *format_reasons(refused)]
        raise UserError("\n".join(lines))
    if not planned:
        reasons: dict[str, list[Point]] = {}
        for one in skipped:
            reasons.setdefault(one.reason, []).append(one.point)
        raise UserError(
            "\n".join([f"None of the {len(points)} points {where} can run here.", *format_reasons(reasons)])
        )
    return SweepPlan(tuple(planned.values()), tuple(duplicates), tuple(skipped))


def format_reasons(reasons: Mapping[str, Sequence[Point]]) -> list[str]:
    """Points under each reason, for people."""
    return [
        "\n".join([*(f"[{point.label}]" for point in reasons[text]), *(f"  {line}" for line in text.splitlines())])
        for text in reasons
    ]
