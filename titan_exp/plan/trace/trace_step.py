"""One rank's step, traced: memory over time, operations, messages. On a pretended rank or a real one alike."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from titan_exp.data.batch import Batch
from titan_exp.plan.cuda.caching_allocator import GRANULE, Event
from titan_exp.plan.cuda.cpu_offload import GPU, OnHost, TwoMemories
from titan_exp.plan.cuda.fake_kernels import cuda_calls, workspace
from titan_exp.plan.cuda.mem_efficient_attention import efficient_kernel, is_asked_for
from titan_exp.plan.extrapolate.segments import Tape
from titan_exp.plan.trace.dispatch_mode import Watch, Work, ranks_by_axis
from titan_exp.plan.trace.inductor import compiled_anew, kernels_left_out
from titan_exp.plan.trace.memory_ledger import Ledger, Moment
from titan_exp.plan.trace.phases import phases_told
from titan_exp.trainer.train_state import TrainState


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
    axes: dict[str, list[int]]
    """Ranks of this rank's group along every axis that it sends messages on."""
    timeline: list[Moment]
    """The step from its beginning to its end, told in moments."""
    before: list[Event]
    """Births and deaths of storages from the build to the step."""
    step: list[Event]
    """Those of the step."""
    host: OnHost | None = None
    """What is on the host instead, where parameters are offloaded to it."""


def trace_step(
    parts: TrainState,
    step: Callable[[], object],
    *,
    first_step: Callable[[], object] | None = None,
    standing: Iterable[Tensor] = (),
    batches: Sequence[Batch] = (),
    cuda: bool = False,
    inductor: bool = False,
    matmul_workspace: int = 0,
    tape: Tape | None = None,
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
    host = TwoMemories() if parts.mesh.device == GPU else None
    ledger = host or (Ledger() if tape is None else tape)
    ledger.granularity = GRANULE if cuda else 1
    if cuda:
        ledger.stream = _Streams()
    with (
        _garbage_stays(),
        phases_told(ledger, parts.model.parts, parts.optimizer) as phases,
        Watch(ledger, parts.mesh, workspace if cuda else None, matmul_workspace) as watch,
        cuda_calls(beside=host is not None) if cuda else nullcontext(),
        efficient_kernel() if cuda and is_asked_for(parts.model.parts) else nullcontext(),
        compiled_anew() if host is not None else nullcontext(),
        kernels_left_out(watch.kernel, parts.mesh.device) if inductor else nullcontext(),
    ):
        for tensor in standing:
            ledger.see(tensor, "other")
        if tape is not None:
            tape.follow(watch)
            tape.next_step()
        (first_step or step)()
        for tensor in looked_at(ledger, batches):
            ledger.see(tensor, "other")
        ledger.begin()
        watch.work, watch.work_elsewhere = Work(), Work()
        step()
        if tape is not None:
            tape.cut("after the step")
        return Trace(
            ledger.peak(),
            ledger.held(),
            phases.gradients,
            watch.work,
            ranks_by_axis(parts.mesh),
            ledger.timeline(),
            ledger.events[: ledger.begun],
            ledger.events[ledger.begun :],
            None if host is None else OnHost(host.host.peak(), host.host.tensors(), watch.work_elsewhere),
        )


def looked_at(ledger: Ledger, batches: Sequence[Batch]) -> list[Tensor]:
    """Of all micro-batches, what is entered of the first."""
    values = [(field.name, getattr(batches[0], field.name)) for field in fields(Batch)] if batches else []
    names = [name for name, value in values if value is not None and ledger.know(value)]
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
