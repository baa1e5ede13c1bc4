"""Trace of one rank's step: memory over time, FLOPs, messages, of any rank of a fake world, or of a real one.

The trainer's own `assemble` and `train_step` run on torch's `fake` process group and in its `FakeTensorMode`. With a
CUDA graph, a pass's memory is the graph's own pool, and replays launch nothing.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param as fsdp_param
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.data.batch import Batch, MicroBatch
from titan_exp.models.spec.lookup import model_spec, mtp_depth
from titan_exp.parallel.activation_checkpoint import saved_calls
from titan_exp.parallel.step_observer import observe_steps
from titan_exp.plan.caching_allocator import GRAPH, MIN_BLOCK, Events
from titan_exp.plan.fake_kernels import efficient_kernel, fake_cuda_kernels, workspaces
from titan_exp.plan.planner_processes import no_garbage_collection
from titan_exp.plan.prediction import Beside, exchange_of
from titan_exp.plan.trace import torch_patches
from titan_exp.plan.trace.dispatch_mode import CostMode, OpCosts, ranks_by_axis
from titan_exp.plan.trace.memory_tracker import Moment
from titan_exp.plan.trace.op_costs import COMPUTE_WEIGHTS, EMBEDDING, assumes_symmetric_memory
from titan_exp.plan.trace.segments import SegmentTracker, sum_costs, track_phases
from titan_exp.trainer.forward_backward import Recording
from titan_exp.trainer.objective import MetricSums
from titan_exp.trainer.part import Parts
from titan_exp.trainer.parts import acting_parts
from titan_exp.trainer.train_state import TrainState, assemble
from titan_exp.trainer.train_step import train_step

CAPTURE = torch.cpu.Stream()  # current stream of captured passes


class FakeRecorder:
    """Runs the first pass as a warm-up on its own stream, and later ones as if captured; replays only count costs."""

    def __init__(self) -> None:
        self.mode: CostMode | None = None
        """Dispatch mode that records operators, if there is one."""
        self._stream = torch.cpu.Stream()

    def warmup(self, work: Callable[[], None]) -> None:
        """Run the work."""
        with torch.cpu.stream(self._stream):  # type: ignore[arg-type]  # torch's annotation lacks its own CPU stream
            work()
        self._stream = CAPTURE

    def record(self, work: Callable[[], None]) -> Recording:
        """Run the work."""
        before = self._costs()
        self.warmup(work)
        once = sum_costs([self._costs(), sum_costs([before], -1)])

        def replay() -> None:
            if self.mode is not None:
                self.mode.costs = sum_costs([self.mode.costs, once])

        return Recording(replay, "a plan")

    def _costs(self) -> OpCosts:
        return sum_costs([] if self.mode is None else [self.mode.costs])


DEVICE = torch.device("cpu")  # device of fake tensors. Torch without CUDA cannot run backward on fake CUDA tensors.


@dataclass(frozen=True)
class FakeRank:
    """One rank of a fake process group."""

    experiment: Experiment
    state: TrainState
    batches: Sequence[MicroBatch]
    recorder: FakeRecorder | None = None
    parts: Parts = field(default_factory=Parts)

    @property
    def exchanges(self) -> Sequence[Beside]:
        """Work of an exchange between worlds, beside some steps."""
        return exchange_of(self.experiment).beside(self.state, self.parts)

    @property
    def preallocated(self) -> list[torch.Tensor]:
        """Batch tensors, which a CPU holds for the whole step; CUDA holds copies of one micro-batch at a time."""
        return [tensor for batch in self.batches if not isinstance(batch, _CopiedBatch) for tensor in batch.tensors]

    def step(self) -> None:
        """Run one optimizer step of the trainer."""
        self._step(self.batches, self.state)

    def trace(self, step: Callable[[], object] | None = None, **options: Any) -> "Trace":
        """Trace a step, by default after the shortest warm-up; `options` are those of `trace_step`."""
        given = {"warmup_step": self.warmup_step, "recorder": self.recorder, "preallocated": self.preallocated}
        return trace_step(self.state, step or self.step, **given | options)

    def warmup_step(self) -> None:
        """Run an optimizer step with the fewest micro-batches; it creates the same optimizer state."""
        few = 1 if self.state.mesh.pp_group is None else self.state.model.eval_microbatches
        self._step(self.batches[:few], self.state)

    def optimizer_step(self) -> None:
        """Run an optimizer step on empty gradients, without passes; it creates the same optimizer state."""
        model = self.state.model

        def no_passes(*_: Any) -> Mapping[str, torch.Tensor]:
            sums = MetricSums(model.objective, self.state.mesh.device)
            for weight in filter(lambda weight: weight.requires_grad, model.parameters()):
                weight.grad = torch.empty_like(weight, dtype=model.weights.gradient_dtype(weight))
            if (pipeline := self.state.built.pipeline) is not None:
                pipeline.sum_tied_gradients()
            return sums.values

        kept = {name: getattr(model, name) for name in ("parts", "weights", "parameters", "unique_parameters", "load")}
        without_passes: Any = SimpleNamespace(**kept, forward_backward=no_passes)
        self._step([], replace(self.state, model=without_passes))

    def _step(self, batches: Sequence[MicroBatch], state: TrainState) -> None:
        train_step(
            state,
            self.parts,
            batches,
            # As in the costliest steps, those with a tail average.
            step=max(1, self.experiment.training.steps),
            tokens=[self.experiment.training.global_batch_size * self.experiment.training.seq_len]
            * (1 + mtp_depth(self.experiment.model)),
            lr=self.experiment.optimizer.lr,
        )


class _CopiedBatch(Batch):
    """Micro-batch on the host of a GPU. The fake GPU is the CPU, too, so torch itself would not copy the batch."""

    def to(self, device: torch.device | str) -> Batch:
        """Allocate the batch on the device."""
        return self.map(torch.empty_like)


@contextmanager
def fake_rank(experiment: Experiment, rank: int) -> Iterator[FakeRank]:
    """Build a global rank of a resolved layout on fake tensors, in the `with` block. Raises the build's UserError."""
    assert not dist.is_initialized(), "a process of a real job cannot be a fake rank"
    layout = ResolvedLayout.of(experiment)
    parallelism = layout.parallelism
    beside_host = layout.device_type == "cuda" and parallelism.cpu_offload
    experiment = replace(experiment, optimizer=experiment.optimizer.costliest)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        mode = _mode()
        with (
            torch_patches.restored_compiler_settings(),
            _readable_meshes(),
            torch_patches.replaced_attributes((fsdp_param, "_chunk_with_empty", _Chunks)),
            torch_patches.gpu_beside_host() if beside_host else nullcontext(),
            assumes_symmetric_memory() if parallelism.async_tp or parallelism.symmetric_exchange else nullcontext(),
        ):
            device = torch_patches.GPU if beside_host else DEVICE
            recorder = FakeRecorder()
            state = assemble(experiment, layout, device, fake_mode=mode, recorder=recorder)
            with mode:
                parts = Parts(acting_parts(experiment, state))
                yield FakeRank(experiment, state, fake_batches(experiment, copied=not beside_host), recorder, parts)
    finally:
        dist.destroy_process_group()
        # Cached shardings refer to this rank's process groups.
        _clear_sharding_prop_cache()


def pipeline_ranks(layout: ResolvedLayout) -> list[int]:
    """Representative global rank of each pipeline rank: the first along all other axes."""
    degree = layout.parallelism.pp
    return [rank * layout.world_size // degree for rank in range(degree)]


@functools.cache
def _mode() -> FakeTensorMode:
    """Fake tensor mode shared by all fake ranks of the process, so that they share cached constants."""
    # Buffers and rank tables are real tensors. Operators without a fake kernel raise instead of being computed.
    return FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)


def fake_batches(experiment: Experiment, *, copied: bool = True) -> Sequence[MicroBatch]:
    """Micro-batches of one data-parallel rank, as the loader makes them. `copied` is False if the fake GPU is a
    different device from the host's, so that torch copies them itself."""
    layout, data, spec = ResolvedLayout.of(experiment), experiment.data, model_spec(experiment.model)
    shape = (layout.micro_batch_size, layout.training.seq_len)
    if spec is not None and spec.inputs is not None:
        return [spec.inputs.example(*shape) for _ in range(layout.gradient_accumulation)]
    kind = _CopiedBatch if copied and layout.device_type == "cuda" else Batch

    def batch() -> Batch:
        tokens = functools.partial(torch.zeros, shape, dtype=torch.int64)
        positions, documents = (tokens() if has else None for has in (data.reset_positions, data.document_mask))
        further = tuple(Batch(tokens(), tokens(), None, None) for _ in range(mtp_depth(experiment.model)))
        return kind(tokens(), tokens(), positions, documents, further)

    return [batch() for _ in range(layout.gradient_accumulation)]


@dataclass(frozen=True)
class _Chunks:
    """Chunks of a parameter, made when read: FSDP2 makes one for each of hundreds of ranks, and reads two."""

    tensor: torch.Tensor
    count: int
    dim: int

    def __getitem__(self, rank: int) -> torch.Tensor:
        length = self.tensor.size(self.dim)
        size = -(-length // self.count)
        if rank and rank * size >= length:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, rank * size, min(size, length - rank * size))


_MESH_METHODS = ("__getitem__", "get_group", "get_local_rank", "get_coordinate", "get_rank", "size", "_get_root_mesh")


def _readable_meshes() -> AbstractContextManager[None]:
    """Let device meshes read their rank tables, which are real tensors, outside fake tensor mode."""

    def without_modes(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return method(*args, **kwargs)

        return call

    methods = ((name, getattr(DeviceMesh, name, None)) for name in _MESH_METHODS)
    replacements = ((DeviceMesh, name, without_modes(method)) for name, method in methods if method is not None)
    return torch_patches.replaced_attributes(*replacements)


@dataclass(frozen=True)
class HostUsage:
    """Host memory of a rank with offloaded parameters."""

    peak: Moment  # peak of host memory, with pinned blocks rounded up
    persistent: dict[str, int]


@dataclass(frozen=True)
class Trace:
    """Costs of a rank's second step, with optimizer state allocated."""

    peak: Moment
    persistent: dict[str, int]  # bytes allocated between steps, by category
    gradients: int  # bytes of this rank's reduced gradients
    costs: OpCosts
    axes: dict[str, list[int]]  # ranks of this rank's groups, by mesh axis
    timeline: list[Moment]
    setup_events: Events  # allocations and releases before the step, from the model's build on
    step_events: Events
    host: HostUsage | None = None  # memory of the host, with offloaded parameters
    saved_calls: tuple[str, ...] = ()  # automatic lists of saved calls in selective activation checkpointing, in words


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
    kernels are skipped. `segments` is an empty tracker, from which the caller reads the step's segments. Raises
    UserError if the step calls an unknown operator.
    """
    tracker, offloaded = segments or SegmentTracker(), state.mesh.device == torch_patches.GPU
    tracker.device = torch_patches.GPU if offloaded else None
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
        torch_patches.reset_dynamo() if offloaded else nullcontext(),
        torch_patches.skip_inductor_kernels(mode.kernel, state.mesh.device) if inductor else nullcontext(),
        torch_patches.compile_as_for_cuda(beside=offloaded) if inductor and cuda else nullcontext(),
        observe_steps(tracker),
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
