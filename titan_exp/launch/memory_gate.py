"""Memory gate: predicts memory before launch, records it in the run folder, refuses runs that do not fit."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.layout_gate import with_layouts
from titan_exp.launch.provenance.secrets import mask_override
from titan_exp.launch.run_plan import RunPlan
from titan_exp.plan.changes import explain_changes
from titan_exp.plan.gate import MemoryCheck, check_memory, explain_oom, explain_retries, plan_record
from titan_exp.tracking.number_format import format_bytes

Echo = Callable[[str], None]

USER_CODE_HINT = (
    "  Training would fail in the same way. To start anyway, use plan.gate=warn, or plan.gate=off for no check."
)
GATE_HINT = "  To start anyway, use plan.gate=warn, or plan.gate=off for no check."


def gate_run(plan: RunPlan, echo: Echo) -> RunPlan:
    """Add the memory prediction to a plan. Raises UserError if it does not fit and plan.gate=refuse."""
    if is_done(plan):
        return plan
    (memory_check,) = with_layouts(check_memory([plan.experiment], _runs(plan), echo), _runs(plan), echo)
    if memory_check.user_error and plan.experiment.plan.gate == "refuse":
        raise UserError(f"{memory_check.user_error}\n{USER_CODE_HINT}")
    if memory_check.layout_error and plan.experiment.plan.gate != "warn":
        raise UserError(memory_check.layout_error)
    if memory_check.fits is False and plan.experiment.plan.gate == "refuse":
        typed = list(map(mask_override, plan.overrides))
        raise UserError(f"{explain_changes(memory_check, _runs(plan), echo, typed)}\n{GATE_HINT}")
    for line in gate_warnings([memory_check]):
        echo(line)
    return with_prediction(plan, memory_check)


def gate_runs(plans: Sequence[RunPlan], echo: Echo) -> list[RunPlan]:
    """Add memory predictions to plans. Raises one UserError that lists all refused runs."""
    checked = list(zip(plans, check_open_runs(plans, echo), strict=True))
    refused = [(plan, check) for plan, check in checked if check is not None and is_refused(check)]
    if refused:
        lines = [f"{plan.folder.path}: {refusal(check)}" for plan, check in refused]
        raise UserError("\n".join([*lines, GATE_HINT]))
    for line in gate_warnings([check for _, check in checked if check is not None]):
        echo(line)
    return [plan if check is None else with_prediction(plan, check) for plan, check in checked]


def check_open_runs(plans: Sequence[RunPlan], echo: Echo) -> list[MemoryCheck | None]:
    """Memory check per plan; None for finished runs."""
    found: dict[int, MemoryCheck] = {}
    open_plans = [number for number, plan in enumerate(plans) if not is_done(plan)]
    for runs in dict.fromkeys(_runs(plans[number]) for number in open_plans):
        here = [number for number in open_plans if _runs(plans[number]) == runs]
        checks = check_memory([plans[number].experiment for number in here], runs, echo)
        found |= zip(here, with_layouts(checks, runs, echo), strict=True)
    return [found.get(number) for number in range(len(plans))]


def is_refused(memory_check: MemoryCheck) -> bool:
    """True if plan.gate=refuse and the run does not fit or its user code fails, or if its layouts differ."""
    gate = memory_check.experiment.plan.gate
    fails = memory_check.fits is False or bool(memory_check.user_error)
    return (fails and gate == "refuse") or (bool(memory_check.layout_error) and gate != "warn")


def refusal(memory_check: MemoryCheck) -> str:
    """Reason for refusing one of several runs."""
    why = memory_check.user_error or memory_check.layout_error
    return why or f"it does not fit: {explain_oom(memory_check)}"


def with_prediction(plan: RunPlan, memory_check: MemoryCheck) -> RunPlan:
    """Set the plan's content of plan.json."""
    found = plan_record(memory_check)
    return plan if found is None else replace(plan, prediction=json.dumps(found, indent=1) + "\n")


def gate_warnings(memory_checks: Sequence[MemoryCheck]) -> list[str]:
    """Distinct warnings about accepted runs, with the number of runs."""
    counts = Counter(filter(None, map(_warning, memory_checks)))
    counts.update(note for memory_check in memory_checks for note in memory_check.layout_notes)
    return [f"{text} ({count} runs)" if count > 1 else text for text, count in counts.items()]


def predicted(plan: RunPlan) -> Iterator[str]:
    """Line on the predicted memory and speed of a run that the gate checked, if they are known."""
    found = {} if plan.prediction is None else json.loads(plan.prediction)
    needed, capacity = found.get("needed_bytes"), found.get("capacity_bytes")
    if capacity is None or not (size := needed or found["bound_bytes"]):
        return
    who = "all its processes" if needed else "each process"
    amount = format_bytes(size) + (f" for {who}" if found["processes_that_share_it"] > 1 else "")
    seconds = found.get("step_seconds")
    speed = "" if seconds is None else f"; {seconds:.3g} s per step, {found['tokens_per_second']:,.0f} tokens/s"
    memory = f"{amount} of {found['device']}'s {format_bytes(capacity)}"
    yield f"predicted: {'' if needed else 'at most '}{memory}{speed}"


def is_done(plan: RunPlan) -> bool:
    """True if state.json records the run as done."""
    state = plan.folder.read_state() if plan.folder.path.exists() else None
    return state is not None and state.state == "done"


def _warning(memory_check: MemoryCheck) -> str:
    if memory_check.user_error:
        return f"We expect this run to fail. {memory_check.user_error}"
    if memory_check.layout_error:
        return memory_check.layout_error
    if memory_check.fits is False:
        return f"We do not expect this run to fit: {explain_oom(memory_check)}"
    if retries := explain_retries(memory_check):
        return f"This run fits {retries}, gives cached memory back, and waits for the GPU each time."
    if memory_check.why_not and memory_check.device_memory is not None:
        return f"We could not check the memory: {memory_check.why_not}."
    return ""


def _runs(plan: RunPlan) -> Path:
    return plan.folder.path.parents[1]
