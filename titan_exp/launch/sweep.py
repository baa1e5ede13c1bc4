"""A sweep: every point is composed and checked before any is started, then they run one after another.

A point that is done already is not run again, so a sweep that was interrupted goes on where it was.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hydra.core.override_parser.types import Override
from rich.console import Console
from rich.table import Table

from titan_exp.config.errors import UserError
from titan_exp.config.experiment import Experiment
from titan_exp.launch.commit import Plan, plan
from titan_exp.launch.run import INTERRUPTED, run
from titan_exp.launch.screen import Screen
from titan_exp.launch.summary import Summary
from titan_exp.tracking.sink import Value


@dataclass(frozen=True)
class Point:
    """One combination of values."""

    overrides: tuple[str, ...]
    """Everything that was typed, with one value for each swept key."""
    label: str
    """The swept ones alone, which is what tells points apart."""


@dataclass
class Row:
    """A line of the table at the end."""

    point: Point
    run_id: str
    state: str
    summary: Summary | None = None


def points(overrides: Sequence[Override]) -> list[Point]:
    """Every combination of the values that are swept over, the last key varying fastest.

    Raises:
        UserError: a key is given an interval, which has no end of values.
    """
    choices: dict[str, list[tuple[str, bool]]] = {}
    for override in overrides:
        key = override.get_key_element()
        if not override.is_sweep_override():
            choices[key] = [(override.input_line or "", False)]
        elif override.is_discrete_sweep():
            choices[key] = [(f"{key}={value}", True) for value in override.sweep_string_iterator()]
        else:
            raise UserError(
                f"{override.input_line}: an interval has no end of values, and this sweep tries all. "
                f"List them: {key}=1,2,3 or {key}=range(1,4)."
            )
    found = []
    for combination in itertools.product(*choices.values()):
        swept = " ".join(text for text, is_swept in combination if is_swept)
        found.append(Point(tuple(text for text, _ in combination), swept or "(nothing swept)"))
    return found


def sweep(
    points: Sequence[Point], compose: Callable[[Point], Experiment], *, run: Callable[[Plan], tuple[int, Summary]]
) -> int:
    """Run every point, one after another, and show what became of them. Returns the exit code.

    Args:
        points: the combinations.
        compose: makes a point's configuration; raises UserError where it cannot.
        run: runs one; returns its exit code and summary.

    Returns:
        0 where all are done, 130 after Ctrl-C, which leaves the rest alone, 1 where one failed, 85 where one stopped.

    Raises:
        UserError: points cannot run. It names all of them, and none was started.
    """
    plans = _plan_all(points, compose)
    if all(planned.experiment.cluster.kind == "slurm" for _, planned in plans):
        from titan_exp.launch.slurm.report import submit

        return submit([planned for _, planned in plans], [point.label for point, _ in plans])
    screen, codes, rows = Screen(), [], []
    for number, (point, planned) in enumerate(plans, 1):
        rows.append(Row(point, planned.run_id, "not started"))
        if INTERRUPTED in codes:
            continue
        screen.say(f"\n[{number}/{len(plans)}] {point.label}")
        code, state, summary = _run_one(planned, run, screen)
        codes.append(code)
        rows[-1].state, rows[-1].summary = state, summary
    _show(rows, len(points))
    for code in (INTERRUPTED, *(code for code in codes if code in (1, 2))):
        if code in codes:
            return INTERRUPTED if code == INTERRUPTED else 1
    return max(codes, default=0)


def run_locally(plan: Plan) -> tuple[int, Summary]:
    """Run one point of a sweep on this machine."""
    outcome = run(plan)
    return outcome.exit_code, outcome.summary


def _run_one(
    planned: Plan, run: Callable[[Plan], tuple[int, Summary]], screen: Screen
) -> tuple[int, str, Summary | None]:
    try:
        code, summary = run(planned)
    except UserError as error:
        screen.complain(str(error))
        return error.exit_code, "refused", None
    return code, summary.state, summary


def _plan_all(points: Iterable[Point], compose: Callable[[Point], Experiment]) -> list[tuple[Point, Plan]]:
    """A plan for every point that is not the same run as one before it."""
    plans: dict[object, tuple[Point, Plan]] = {}
    refused: dict[str, list[Point]] = {}
    for point in points:
        try:
            planned = plan(compose(point), point.overrides)
        except UserError as error:
            refused.setdefault(str(error), []).append(point)
        else:
            plans.setdefault(planned.folder.path, (point, planned))
    if refused:
        blocks = [
            "\n".join([*(f"[{point.label}]" for point in refused[text]), *(f"  {line}" for line in text.splitlines())])
            for text in refused
        ]
        count = sum(map(len, refused.values()))
        raise UserError("\n".join([f"{count} point(s) of the sweep cannot run, so none was started.", *blocks]))
    return list(plans.values())


def _show(rows: Sequence[Row], point_count: int) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("point", "run", "state"):
        table.add_column(heading, overflow="fold")
    for heading in ("loss", "validation loss"):
        table.add_column(heading, justify="right")
    for row in rows:
        loss = None if row.summary is None else row.summary.loss
        validation = None if row.summary is None else row.summary.validation_loss
        table.add_row(row.point.label, row.run_id, row.state, _number(loss), _number(validation))
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=200)  # a file has no edge to fold lines at
    console.print()
    console.print(table)
    if point_count > len(rows):
        console.print(f"{point_count - len(rows)} more point(s) are the same run as one of these.")


def _number(value: Value) -> str:
    return "-" if value is None else f"{value:.4f}"
