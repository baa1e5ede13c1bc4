"""Trace of one rank's step: memory over time, FLOPs, messages. The rank may be fake or real."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from titan_exp.parallel.activation_checkpoint import saved_calls
from titan_exp.parallel.step_observer import observe_steps
from titan_exp.plan.cuda.caching_allocator import GRAPH, MIN_BLOCK, Events
from titan_exp.plan.cuda.fake_kernels import efficient_kernel, fake_cuda_kernels, workspaces
from titan_exp.plan.planner_processes import no_garbage_collection
from titan_exp.plan.prediction import Beside
from titan_exp.plan.trace.dispatch_mode import CostMode, OpCosts, ranks_by_axis
from titan_exp.plan.trace.fake_world import CAPTURE, FakeRecorder
from titan_exp.plan.trace.memory_tracker import Moment
from titan_exp.plan.trace.op_costs import COMPUTE_WEIGHTS, EMBEDDING
from titan_exp.plan.trace.segments import SegmentObserver, SegmentTracker, track_phases
from titan_exp.plan.trace.torch_patches import GPU, compile_as_for_cuda, reset_dynamo, skip_inductor_kernels
from titan_exp.trainer.train_state import TrainState


@dataclass(frozen=True)
class HostUsage:
    """Host memory of a rank with offloaded parameters."""

    peak: Moment
    """Peak of host memory, with pinned blocks rounded up."""
    persistent: dict[str, int]
    """Bytes of tensors on the host between steps, by category."""


@dataclass(frozen=True)
class Trace:
    """Costs of a rank's second step, with optimizer state allocated."""

    peak: Moment
    """Peak memory."""
    persistent: dict[str, int]
    """Bytes allocated between steps, by category."""
    gradients: int
    """Bytes of this rank's reduced gradients."""
    costs: OpCosts
    """FLOPs, memory traffic and messages of the step."""
    axes: dict[str, list[int]]
    """Ranks of this rank's groups, by mesh axis."""
    timeline: list[Moment]
    """Memory from the beginning to the end of the step."""
    setup_events: Events
    """Allocations and releases before the step, from the model's build on."""
    step_events: Events
    """Allocations and releases in the step."""
    host: HostUsage | None = None
    """Memory of the host, with offloaded parameters."""
    saved_calls: tuple[str, ...] = ()
    """Automatic lists of saved calls in selective activation checkpointing, in words."""


def trace_step(
    state: TrainState,
    step: Callable[[], object],
    *,
    warmup_step: Callable[[], object] | None = None,
    beside: Sequence[Beside] = (),
    recorder: FakeRecorder | None = None,
    preallocated: Iterable[Tensor] = (),
    cuda: bool = False,
    inductor: bool = False,
    matmul_workspace: int = 0,
    rounds: bool = True,
    segments: SegmentTracker | None = None,
) -> Trace:
    """Run two steps and trace the second.

    The first step is `warmup_step`, a shorter one that creates the optimizer state, or `step` itself. `preallocated`
    are tensors allocated before it, besides the model. Work `beside` the second step adds no costs. A captured model
    has a `recorder`. With `cuda`, sizes follow CUDA's kernels and allocator, and the matmul library keeps
    `matmul_workspace` bytes per calling thread; without `rounds`, sizes are the tensors' own. With `inductor`, compiled
    kernels are skipped. `segments` is an empty tracker, from which the caller reads the step's segments.

    Raises:
        UserError: the step calls an unknown operator.
    """
    tracker, offloaded = segments or SegmentTracker(), state.mesh.device == GPU
    tracker.device = GPU if offloaded else None
    tracker.granularity = MIN_BLOCK if cuda and rounds else 1
    if cuda:
        # FSDP2's streams on a CPU are no-op objects, numbered in order of use.
        numbers = defaultdict[object, int](count(1).__next__, {torch.cpu.current_stream(): 0, CAPTURE: GRAPH})
        tracker.stream = lambda: numbers[torch.cpu.current_stream()]
        if state.built.pipeline is not None:
            # A fake process group completes sends immediately in torch 2.15, and never in 2.13.
            state.built.pipeline.transport.sees_completion = False
    with (
        no_garbage_collection(),
        track_phases(tracker, state.model.parts, state.model.weights.copies.values()),
        CostMode(tracker, state.mesh, workspaces if cuda else None, matmul_workspace) as mode,
        fake_cuda_kernels(beside=offloaded) if cuda else nullcontext(),
        efficient_kernel(state.model.parts) if cuda else nullcontext(),
        reset_dynamo() if offloaded else nullcontext(),
        skip_inductor_kernels(mode.kernel, state.mesh.device) if inductor else nullcontext(),
        compile_as_for_cuda(beside=offloaded) if inductor and cuda else nullcontext(),
        observe_steps(SegmentObserver(tracker)),
    ):
        for tensor in preallocated:
            tracker.track(tensor, "other")
        tracker.mode = mode
        if recorder is not None:
            recorder.mode = mode
        tracker.next_step()
        (warmup_step or step)()
        for other in beside:
            if other.before:
                _add_memory(mode, other.category, other.phase, other.before)
        mode.costs = OpCosts()
        tracker.outside_passes = EMBEDDING
        tracker.begin_step()
        step()
        for other in beside:
            _add_memory(mode, other.category, other.phase, other.after)
        tracker.cut(tracker.position)
        return Trace(
            tracker.peak(),
            tracker.allocated(),
            tracker.gradients,
            mode.costs,
            ranks_by_axis(state.mesh),
            tracker.timeline(),
            *tracker.events(),
            HostUsage(tracker.peak(on_host=True), tracker.tensors_on_host()) if offloaded else None,
            tuple(dict.fromkeys(str(saved) for part in state.model.parts for saved in saved_calls(part))),
        )


def _add_memory(mode: CostMode, category: str, phase: str, actions: Sequence[Callable[[], object]]) -> None:
    """Trace the memory of a phase that is not part of every step's costs."""
    tracker, costs = mode.tracker, mode.costs
    tracker.begin_phase(category, phase, COMPUTE_WEIGHTS)
    mode.costs = OpCosts()
    for action in actions:
        action()
    mode.costs = costs
    tracker.begin_phase("other", "between steps", COMPUTE_WEIGHTS)
