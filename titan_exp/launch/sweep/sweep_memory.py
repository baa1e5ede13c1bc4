"""The points of a sweep before its launch: what is predicted of each, and which of them cannot fit."""

from dataclasses import replace

from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.memory_gate import (
    HOW_ALL_THE_SAME,
    Say,
    explain_oom,
    is_refused,
    judgements,
    remarks,
    with_judgement,
)
from titan_exp.launch.sweep.sweep_plan import Planned, Point, Skipped, SweepPlan, blocks


def prediction(made: SweepPlan, say: Say, *, skip: bool, where: str = "of the sweep") -> SweepPlan:
    """The plan with what is predicted of every point; those that do not fit are skipped, or refuse the sweep.

    Args:
        made: the points that keep every rule.
        say: takes lines for the user.
        skip: leave out points that do not fit; without, one of them refuses the sweep.
        where: ends "n point(s) ..." in what is said of mistakes.

    Raises:
        UserError: points do not fit and, without `skip`, none is started; or none is left.
    """
    memory_checks = judgements([one.plan for one in made.planned], say)
    kept: list[Planned] = []
    refused: dict[object, str] = {}
    for one, memory_check in zip(made.planned, memory_checks, strict=True):
        if memory_check is None:
            kept.append(one)
        elif is_refused(memory_check):
            refused[one.plan.folder.path] = f"it does not fit: {explain_oom(memory_check)}"
        else:
            kept.append(replace(one, plan=with_judgement(one.plan, memory_check), memory_check=memory_check))
    for line in remarks([one.memory_check for one in kept if one.memory_check is not None]):
        say(line)
    if not refused:
        return replace(made, planned=tuple(kept))
    gone = [one for one in (*made.planned, *made.doubles) if one.plan.folder.path in refused]
    reasons: dict[str, list[Point]] = {}
    for one in gone:
        reasons.setdefault(refused[one.plan.folder.path], []).append(one.point)
    if not skip or not kept:
        none = "so none was started" if kept else "and no other is left"
        text = [f"{len(gone)} point(s) {where} cannot run, {none}.", *blocks(reasons), HOW_ALL_THE_SAME]
        raise UserError("\n".join(text))
    skipped = [Skipped(one.point, refused[one.plan.folder.path]) for one in gone]
    doubles = tuple(one for one in made.doubles if one.plan.folder.path not in refused)
    return SweepPlan(tuple(kept), doubles, (*made.skipped, *skipped))
