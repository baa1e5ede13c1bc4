"""Before a launch: what is predicted of its memory, said, written into its folder, and refused where it cannot fit."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.run_plan import RunPlan
from titan_exp.plan.gate.gate import MemoryCheck, check_memory, explain_oom, gib, plan_record
from titan_exp.plan.gate.suggestions import Suggestion, suggestions

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
    (memory_check,) = check_memory([plan.experiment], _runs(plan), say)
    if memory_check.fits is False and plan.experiment.plan.gate == "refuse":
        raise UserError(_refusal(memory_check, _runs(plan), say))
    for line in remarks([memory_check]):
        say(line)
    return with_prediction(plan, memory_check)


def gate_runs(plans: Sequence[RunPlan], say: Say) -> list[RunPlan]:
    """The same of several plans.

    Raises:
        UserError: one of them is refused; it names all of these.
    """
    memory_checks = check_open_runs(plans, say)
    refused = [(plan, it) for plan, it in zip(plans, memory_checks, strict=True) if it is not None and is_refused(it)]
    if refused:
        lines = [f"{plan.folder.path}: {explain_oom(memory_check)}" for plan, memory_check in refused]
        raise UserError("\n".join([*lines, GATE_HINT]))
    for line in remarks([it for it in memory_checks if it is not None]):
        say(line)
    return [plan if it is None else with_prediction(plan, it) for plan, it in zip(plans, memory_checks, strict=True)]


def check_open_runs(plans: Sequence[RunPlan], say: Say) -> list[MemoryCheck | None]:
    """What is known of each plan's memory; None for runs that are done, which are not started again."""
    found: dict[int, MemoryCheck] = {}
    open_plans = [number for number, plan in enumerate(plans) if not is_done(plan)]
    for runs in dict.fromkeys(_runs(plans[number]) for number in open_plans):
        here = [number for number in open_plans if _runs(plans[number]) == runs]
        found |= zip(here, check_memory([plans[number].experiment for number in here], runs, say), strict=True)
    return [found.get(number) for number in range(len(plans))]


def is_refused(memory_check: MemoryCheck) -> bool:
    """Whether the run must not be started."""
    return memory_check.fits is False and memory_check.experiment.plan.gate == "refuse"


def with_prediction(plan: RunPlan, memory_check: MemoryCheck) -> RunPlan:
    """The plan with what plan.json will say."""
    found = plan_record(memory_check)
    return plan if found is None else replace(plan, prediction=json.dumps(found, indent=1) + "\n")


def remarks(memory_checks: Sequence[MemoryCheck]) -> list[str]:
    """What is to be said of runs that are started: each thing once, with how many runs it is about."""
    said: dict[str, int] = {}
    for memory_check in memory_checks:
        text = _remark(memory_check)
        if text:
            said[text] = said.get(text, 0) + 1
    return [f"{text} ({count} runs)" if count > 1 else text for text, count in said.items()]


def is_done(plan: RunPlan) -> bool:
    """Whether the run has come to its end before."""
    state = plan.folder.read_state() if plan.folder.path.exists() else None
    return state is not None and state.state == "done"


GATE_HINT = "  plan.gate=warn starts it all the same, plan.gate=off without looking."


def _remark(memory_check: MemoryCheck) -> str:
    if memory_check.fits is False:
        return f"This run is not expected to fit: {explain_oom(memory_check)}"
    if memory_check.why_not and memory_check.device_memory is not None:
        return f"Whether its memory fits is not predicted: {memory_check.why_not}."
    return ""


def _refusal(memory_check: MemoryCheck, runs: Path, say: Say) -> str:
    found = suggestions(memory_check, runs, say)
    lines = [f"This run does not fit: {explain_oom(memory_check)}"]
    if found:
        lines.append("  What would fit, each of these planned:")
        width = max(len(_typed(suggestion)) for suggestion in found)
        lines += [f"    {_typed(suggestion):{width}}  {_outcome(suggestion)}" for suggestion in found]
    else:
        lines.append("  No change that was tried would fit; a smaller model, or shorter sequences, would need less.")
    return "\n".join([*lines, GATE_HINT])


def _typed(suggestion: Suggestion) -> str:
    return " ".join(suggestion.overrides)


def _outcome(suggestion: Suggestion) -> str:
    memory_check = suggestion.memory_check
    assert memory_check.device_memory is not None, "it was planned"
    if memory_check.prediction is None:
        return "fits by an upper bound"
    words = [gib(memory_check.prediction.largest.peak + memory_check.device_memory.overhead)]
    if memory_check.device_memory.sharing > 1:
        words.append(f"{gib(memory_check.needed or 0)} together")
    return ", ".join(words)


def _runs(plan: RunPlan) -> Path:
    return plan.folder.path.parents[1]
