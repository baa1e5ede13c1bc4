"""Before a launch: what is predicted of its memory, said, written into its folder, and refused where it cannot fit."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.run_plan import RunPlan
from titan_exp.plan.gate.gate import Judgement, gib, judge, record, refusal
from titan_exp.plan.gate.suggestions import Remedy, remedies

Say = Callable[[str], None]


def gate_run(plan: RunPlan, say: Say) -> RunPlan:
    """A plan that may be started, with what is predicted of it.

    Args:
        plan: of the run.
        say: takes lines for the user.

    Raises:
        UserError: its predicted memory is more than there is, and plan.gate=refuse.
    """
    if is_done(plan):
        return plan
    (judgement,) = judge([plan.experiment], _runs(plan), say)
    if judgement.fits is False and plan.experiment.plan.gate == "refuse":
        raise UserError(_refusal(judgement, _runs(plan), say))
    for line in remarks([judgement]):
        say(line)
    return with_prediction(plan, judgement)


def gate_runs(plans: Sequence[RunPlan], say: Say) -> list[RunPlan]:
    """The same of several plans.

    Raises:
        UserError: one of them is refused; it names all of these.
    """
    judged = judgements(plans, say)
    refused = [(plan, it) for plan, it in zip(plans, judged, strict=True) if it is not None and is_refused(it)]
    if refused:
        lines = [f"{plan.folder.path}: {refusal(judgement)}" for plan, judgement in refused]
        raise UserError("\n".join([*lines, GATE_HINT]))
    for line in remarks([it for it in judged if it is not None]):
        say(line)
    return [plan if it is None else with_prediction(plan, it) for plan, it in zip(plans, judged, strict=True)]


def judgements(plans: Sequence[RunPlan], say: Say) -> list[Judgement | None]:
    """What is known of each plan's memory; None for runs that are done, which are not started again."""
    found: dict[int, Judgement] = {}
    open_plans = [number for number, plan in enumerate(plans) if not is_done(plan)]
    for runs in dict.fromkeys(_runs(plans[number]) for number in open_plans):
        here = [number for number in open_plans if _runs(plans[number]) == runs]
        found |= zip(here, judge([plans[number].experiment for number in here], runs, say), strict=True)
    return [found.get(number) for number in range(len(plans))]


def is_refused(judgement: Judgement) -> bool:
    """Whether the run must not be started."""
    return judgement.fits is False and judgement.experiment.plan.gate == "refuse"


def with_prediction(plan: RunPlan, judgement: Judgement) -> RunPlan:
    """The plan with what plan.json will say."""
    found = record(judgement)
    return plan if found is None else replace(plan, prediction=json.dumps(found, indent=1) + "\n")


def remarks(judged: Sequence[Judgement]) -> list[str]:
    """What is to be said of runs that are started: each thing once, with how many runs it is about."""
    said: dict[str, int] = {}
    for judgement in judged:
        text = _remark(judgement)
        if text:
            said[text] = said.get(text, 0) + 1
    return [f"{text} ({count} runs)" if count > 1 else text for text, count in said.items()]


def is_done(plan: RunPlan) -> bool:
    """Whether the run has come to its end before."""
    state = plan.folder.read_state() if plan.folder.path.exists() else None
    return state is not None and state.state == "done"


GATE_HINT = "  plan.gate=warn starts it all the same, plan.gate=off without looking."


def _remark(judgement: Judgement) -> str:
    if judgement.fits is False:
        return f"This run is not expected to fit: {refusal(judgement)}"
    if judgement.why_not and judgement.target is not None:
        return f"Whether its memory fits is not predicted: {judgement.why_not}."
    return ""


def _refusal(judgement: Judgement, runs: Path, say: Say) -> str:
    found = remedies(judgement, runs, say)
    lines = [f"This run does not fit: {refusal(judgement)}"]
    if found:
        lines.append("  What would fit, each of these planned:")
        width = max(len(_typed(remedy)) for remedy in found)
        lines += [f"    {_typed(remedy):{width}}  {_outcome(remedy)}" for remedy in found]
    else:
        lines.append("  No change that was tried would fit; a smaller model, or shorter sequences, would need less.")
    return "\n".join([*lines, GATE_HINT])


def _typed(remedy: Remedy) -> str:
    return " ".join(remedy.overrides)


def _outcome(remedy: Remedy) -> str:
    judgement = remedy.judgement
    assert judgement.target is not None, "it was planned"
    if judgement.prediction is None:
        return "fits by an upper bound"
    words = [gib(judgement.prediction.largest.peak + judgement.target.overhead)]
    if judgement.target.sharing > 1:
        words.append(f"{gib(judgement.needed or 0)} together")
    return ", ".join(words)


def _runs(plan: RunPlan) -> Path:
    return plan.folder.path.parents[1]
