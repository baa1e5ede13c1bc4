"""One rank's step, traced: memory over time, operations, messages. On a pretended rank or a real one alike."""

from collections.abc import Callable
from dataclasses import dataclass

from titan_exp.plan.memory import Ledger, Moment
from titan_exp.plan.phases import phases_told
from titan_exp.plan.watch import Watch, Work
from titan_exp.trainer.assemble import Assembly


@dataclass(frozen=True)
class Trace:
    """What a step of one rank takes once it runs in its stride: the second one, when the optimizer has its state."""

    peak: Moment
    """When most memory is held."""
    kept: dict[str, int]
    """Bytes held between steps, by what they are for."""
    gradients: int
    """Bytes of this rank's reduced gradients, as the optimizer takes them."""
    work: Work
    """Operations, bytes and messages of the step."""
    timeline: list[tuple[int, str]]
    """Bytes alive after each change of them, and what was being computed."""


def trace_step(parts: Assembly, step: Callable[[], object], *, granularity: int = 1) -> Trace:
    """Run two steps and watch the second.

    Args:
        parts: this rank's part of the run.
        step: runs one optimizer step.
        granularity: bytes to which the device's allocator rounds up.

    Raises:
        UserError: the step calls an operator that the planner does not know.
    """
    ledger = Ledger(granularity)
    with phases_told(ledger, parts.model.parts, parts.optimizer) as phases, Watch(ledger, parts.mesh) as watch:
        step()
        ledger.begin()
        watch.work = Work()
        step()
        return Trace(ledger.peak(), ledger.held(), phases.gradients, watch.work, ledger.timeline())
