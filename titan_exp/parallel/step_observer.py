"""Step observer: callbacks inside one optimizer step, by default no-ops, for the planner and other instruments."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor, nn

from titan_exp.config.layout.pipeline_schedules import Action


class StepObserver:
    """Callbacks of a training step, each a no-op. Subclasses override those that they need."""

    def microbatch_begin(self, index: int) -> None:
        """Forward and backward of a micro-batch begin, without a pipeline."""

    def action_begin(self, action: Action) -> None:
        """A pipeline action begins, its input received."""

    def action_end(self, action: Action, result: Tensor | None) -> None:
        """A pipeline action has computed its output, or the gradient of its input."""

    def stage_reduction_begin(self, stage: int) -> None:
        """The gradients of a pipeline stage are about to be reduced."""

    def group_reduction_begin(self) -> None:
        """The gradients of one FSDP parameter group of that stage are about to be reduced."""

    def stage_reduction_end(self) -> None:
        """All parameter groups of that stage have begun to reduce their gradients; FSDP waits for them next."""

    def gradients_ready(self, parts: Sequence[nn.Module]) -> None:
        """Every backward pass is done and gradients are in `weight.grad`. Clipping and the optimizer follow."""


_OBSERVER = ContextVar("step_observer", default=StepObserver())  # noqa: B039  # stateless


def step_observer() -> StepObserver:
    """The observer of the current step."""
    return _OBSERVER.get()


@contextmanager
def observe_steps(observer: StepObserver) -> Iterator[None]:
    """Report the steps of the `with` block to an observer."""
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)
