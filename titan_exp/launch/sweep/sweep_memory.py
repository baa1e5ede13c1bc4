"""Memory gate of a sweep: predicts every point and skips or refuses those that do not fit."""

from dataclasses import replace
from pathlib import Path

from titan_exp.launch.memory_gate import (
    GATE_HINT,
    Echo,
    check_open_runs,
    gate_warnings,
    is_refused,
    refusal,
    with_prediction,
)
from titan_exp.launch.sweep.sweep_plan import PlannedPoint, SkippedPoint, SweepPlan, cannot_run


def predict_sweep_memory(sweep_plan: SweepPlan, echo: Echo, *, skip: bool, where: str = "of the sweep") -> SweepPlan:
    """Add memory predictions to a sweep plan, and skip points that do not fit.

    Raises UserError if points do not fit and `skip` is False, or no point is left. `where` follows "n point(s)" in the
    message.
    """
    memory_checks = check_open_runs([entry.plan for entry in sweep_plan.planned], echo)
    kept: list[PlannedPoint] = []
    refused: dict[Path, str] = {}
    for entry, memory_check in zip(sweep_plan.planned, memory_checks, strict=True):
        if memory_check is None:
            kept.append(entry)
        elif is_refused(memory_check):
            refused[entry.plan.folder.path] = refusal(memory_check)
        else:
            kept.append(replace(entry, plan=with_prediction(entry.plan, memory_check), memory_check=memory_check))
    for line in gate_warnings([entry.memory_check for entry in kept if entry.memory_check is not None]):
        echo(line)
    if not refused:
        return replace(sweep_plan, planned=tuple(kept))
    skipped = [
        SkippedPoint(entry.point, refused[entry.plan.folder.path])
        for entry in (*sweep_plan.planned, *sweep_plan.duplicates)
        if entry.plan.folder.path in refused
    ]
    if not skip or not kept:
        none = "so none was started" if kept else "and no other is left"
        raise cannot_run(f"{len(skipped)} point(s) {where} cannot run, {none}.", skipped, GATE_HINT)
    duplicates = tuple(entry for entry in sweep_plan.duplicates if entry.plan.folder.path not in refused)
    return SweepPlan(tuple(kept), duplicates, (*sweep_plan.skipped, *skipped))
