"""The points of a sweep before its launch: what is predicted of each, and which of them cannot fit."""

from dataclasses import replace

from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.memory_gate import (
    GATE_HINT,
    Say,
    check_open_runs,
    explain_oom,
    is_refused,
    remarks,
    with_prediction,
)
from titan_exp.launch.sweep.sweep_plan import PlannedPoint, Point, SkippedPoint, SweepPlan, format_reasons


def predict_sweep_memory(sweep_plan: SweepPlan, echo: Say, *, skip: bool, where: str = "of the sweep") -> SweepPlan:
    """The plan with what is predicted of every point; those that do not fit are skipped, or refuse the sweep.

    Args:
        made: the points that keep every rule.
        say: takes lines for the user.
        skip: leave out points that do not fit; without, one of them refuses the sweep.
        where: ends "n point(s) ..." in what is said of mistakes.

    Raises:
        UserError: points do not fit and, without `skip`, none is started; or none is left.
    """
    memory_checks = check_open_runs([one.plan for one in sweep_plan.planned], echo)
    kept: list[PlannedPoint] = []
    refused: dict[object, str] = {}
    for one, memory_check in zip(sweep_plan.planned, memory_checks, strict=True):
        if memory_check is None:
            kept.append(one)
        elif is_refused(memory_check):
            refused[one.plan.folder.path] = f"it does not fit: {explain_oom(memory_check)}"
        else:
            kept.append(replace(one, plan=with_prediction(one.plan, memory_check), memory_check=memory_check))
    for line in remarks([one.memory_check for one in kept if one.memory_check is not None]):
        echo(line)
    if not refused:
        return replace(sweep_plan, planned=tuple(kept))
    gone = [one for one in (*sweep_plan.planned, *sweep_plan.duplicates) if one.plan.folder.path in refused]
    reasons: dict[str, list[Point]] = {}
    for one in gone:
        reasons.setdefault(refused[one.plan.folder.path], []).append(one.point)
    if not skip or not kept:
        none = "so none was started" if kept else "and no other is left"
        text = [f"{len(gone)} point(s) {where} cannot run, {none}.", *format_reasons(reasons), GATE_HINT]
        raise UserError("\n".join(text))
    skipped = [SkippedPoint(one.point, refused[one.plan.folder.path]) for one in gone]
    duplicates = tuple(one for one in sweep_plan.duplicates if one.plan.folder.path not in refused)
    return SweepPlan(tuple(kept), duplicates, (*sweep_plan.skipped, *skipped))
