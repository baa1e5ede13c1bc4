"""Step observer: callbacks inside one optimizer step, no-ops by default, for the planner and the profiler."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor, nn
from torch.optim import Optimizer

from titan_exp.config.layout.pipeline_schedules import Action


class StepObserver:
    """Callbacks inside a training step; each does nothing unless a subclass overrides it."""

    def microbatch_begin(self, index: int) -> None:
        """Called before forward and backward of a micro-batch, without a pipeline."""

    def action_begin(self, action: Action) -> None:
        """Called before a pipeline action, once its input has been received."""

    def action_end(self, action: Action, result: Tensor | None) -> None:
        """Called after a pipeline action; `result` is its output or the gradient of its input."""

    def weight_gradients_begin(self, weights: Sequence[str]) -> None:
        """Called before gradients of these weights of the stage, in the second part of a split backward pass."""

    def gradient_group_begin(self) -> None:
        """Called after a part of a split backward pass, before gradients of a group join their sum, as they reduce."""

    def stage_reduction_begin(self, stage: int) -> None:
        """Called before the gradients of a pipeline stage are reduced."""

    def group_reduction_begin(self) -> None:
        """Called before the gradients of each block of the stage are reduced; first come the other FSDP groups."""

    def stage_reduction_end(self) -> None:
        """Called after all parameter groups of the stage have started their reduction; FSDP waits for them next."""

    def tied_sum_begin(self) -> None:
        """Called before the gradients of tied weights are summed, after all reductions of a pipeline rank."""

    def gradients_ready(self, parts: Sequence[nn.Module]) -> None:
        """Called after all backward passes, with gradients in `weight.grad`, before clipping and the optimizer."""

    def update_begin(self, optimizer: Optimizer) -> None:
        """Called before the optimizer's step, with clipped gradients."""

    def update_end(self, optimizer: Optimizer) -> None:
        """Called after the optimizer's step and the parts that act on it, while gradients still exist."""


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
