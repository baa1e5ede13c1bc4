"""One rank's step, traced: memory over time, operations, messages. On a pretended rank or a real one alike."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from titan_exp.data.batch import Batch
from titan_exp.plan.cuda.caching_allocator import MIN_BLOCK, Event
from titan_exp.plan.cuda.cpu_offload import GPU, HostAndGpuTracker, HostUsage
from titan_exp.plan.cuda.fake_kernels import fake_cuda_kernels, workspace
from titan_exp.plan.cuda.mem_efficient_attention import efficient_kernel, uses_efficient_attention
from titan_exp.plan.extrapolate.segments import SegmentTracker
from titan_exp.plan.trace.dispatch_mode import CostMode, OpCosts, ranks_by_axis
from titan_exp.plan.trace.inductor import reset_dynamo, skip_inductor_kernels
from titan_exp.plan.trace.memory_tracker import MemoryTracker, Moment
from titan_exp.plan.trace.phases import track_phases
from titan_exp.trainer.train_state import TrainState


@dataclass(frozen=True)
class Trace:
    """What a step of one rank takes once it runs in its stride: the second one, when the optimizer has its state."""

    peak: Moment
    """When most memory is held."""
    persistent: dict[str, int]
    """Bytes held between steps, by what they are for."""
    gradients: int
    """Bytes of this rank's reduced gradients, as the optimizer takes them."""
    costs: OpCosts
    """Operations, bytes and messages of the step."""
    axes: dict[str, list[int]]
    """Ranks of this rank's group along every axis that it sends messages on."""
    timeline: list[Moment]
    """The step from its beginning to its end, told in moments."""
    setup_events: list[Event]
    """Births and deaths of storages from the build to the step."""
    step_events: list[Event]
    """Those of the step."""
    host: HostUsage | None = None
    """What is on the host instead, where parameters are offloaded to it."""


def trace_step(
    state: TrainState,
    step: Callable[[], object],
    *,
    warmup_step: Callable[[], object] | None = None,
    preallocated: Iterable[Tensor] = (),
    batches: Sequence[Batch] = (),
    cuda: bool = False,
    inductor: bool = False,
    matmul_workspace: int = 0,
    segments: SegmentTracker | None = None,
) -> Trace:
    """Run two steps and watch the second.

    Args:
        parts: this rank's part of the run.
        step: runs one optimizer step.
        first_step: runs one after which the optimizer has its state; None is `step`.
        standing: what is there before the first step, besides the model.
        batches: micro-batches of a step; what the first step has looked at of one is there of all.
        cuda: whether a step on CUDA is pretended, with the sizes that its kernels and its allocator have.
        inductor: whether some of it is compiled by inductor, whose kernels do nothing then.
        matmul_workspace: bytes that the library of matmuls keeps for each thread that calls it.
        tape: an empty ledger that also cuts the step into pieces; None keeps one that does not.

    Raises:
        UserError: the step calls an operator that the planner does not know.
    """
    host = HostAndGpuTracker() if state.mesh.device == GPU else None
    tracker = host or (MemoryTracker() if segments is None else segments)
    tracker.granularity = MIN_BLOCK if cuda else 1
    if cuda:
        tracker.stream = _Streams()
    with (
        _garbage_stays(),
        track_phases(tracker, state.model.parts, state.optimizer) as phases,
        CostMode(tracker, state.mesh, workspace if cuda else None, matmul_workspace) as watch,
        fake_cuda_kernels(beside=host is not None) if cuda else nullcontext(),
        efficient_kernel() if cuda and uses_efficient_attention(state.model.parts) else nullcontext(),
        reset_dynamo() if host is not None else nullcontext(),
        skip_inductor_kernels(watch.kernel, state.mesh.device) if inductor else nullcontext(),
    ):
        for tensor in preallocated:
            tracker.see(tensor, "other")
        if segments is not None:
            segments.follow(watch)
            segments.next_step()
        (warmup_step or step)()
        for tensor in looked_at(tracker, batches):
            tracker.see(tensor, "other")
        tracker.begin()
        watch.costs, watch.work_elsewhere = OpCosts(), OpCosts()
        step()
        if segments is not None:
            segments.cut("after the step")
        return Trace(
            tracker.peak(),
            tracker.held(),
            phases.gradients,
            watch.costs,
            ranks_by_axis(state.mesh),
            tracker.timeline(),
            tracker.events[: tracker.begun],
            tracker.events[tracker.begun :],
            None if host is None else HostUsage(host.host.peak(), host.host.tensors(), watch.work_elsewhere),
        )


def looked_at(tracker: MemoryTracker, batches: Sequence[Batch]) -> list[Tensor]:
    """Of all micro-batches, what is entered of the first."""
    values = [(field.name, getattr(batches[0], field.name)) for field in fields(Batch)] if batches else []
    names = [name for name, value in values if value is not None and tracker.know(value)]
    return [getattr(batch, name) for batch in batches for name in names]


class _Streams:
    """Numbers the streams that FSDP2 works on, which it has on a CPU too, where they are names and nothing else."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {torch.cpu.current_stream(): 0}

    def __call__(self) -> int:
        return self._numbers.setdefault(torch.cpu.current_stream(), len(self._numbers))


@contextmanager
def _garbage_stays() -> Iterator[None]:
    """As the trainer has it: nothing is collected within a step, so that what refers to itself lives on."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
