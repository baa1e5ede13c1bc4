"""From an experiment to what it will take: pipeline ranks' steps traced, or put together, and the time estimated."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.machine.devices import device_type, node_size
from titan_exp.models.spec.lookup import with_attention_backend
from titan_exp.plan.cuda.caching_allocator import Reservations, reservations
from titan_exp.plan.cuda.cpu_offload import GPU
from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.cuda.fake_kernels import fake_cuda_capability
from titan_exp.plan.extrapolate.allocation_events import ExtrapolationError
from titan_exp.plan.extrapolate.eligibility import is_worthwhile, unsupported_reason
from titan_exp.plan.extrapolate.extrapolated_trace import TraceExtrapolator
from titan_exp.plan.supported import attention_kernel, check_supported, check_supported_on
from titan_exp.plan.time.roofline import RankTime, rank_time, step_time
from titan_exp.plan.trace.fake_world import DEVICE, FakeRank, fake_rank, pipeline_ranks
from titan_exp.plan.trace.inductor import uses_inductor
from titan_exp.plan.trace.trace_step import Trace, trace_step


@dataclass(frozen=True)
class RankPlan:
    """What is predicted of one pipeline rank; the ranks that differ from it in other axes alone have the same."""

    pipeline_rank: int
    """Its number along pp."""
    trace: Trace
    """Memory, operations, messages."""
    time: RankTime | None
    """Of its step; None where nothing is known of the device's speed."""
    reserved: Reservations | None = None
    """What torch's allocator takes from the device for it; None on a CPU, where it keeps nothing."""

    @property
    def sent(self) -> int:
        """Bytes of hidden states that are sent in a step.

        All of a pass are counted until it ends, since the host, which frees them, may be that far ahead of the GPU.
        """
        messages = self.trace.costs.messages.items()
        return sum(size for (axis, kind), size in messages if kind == "send" and "pp" in axis.split("="))

    @property
    def bytes(self) -> int:
        """Of the device's memory: what is reserved, else what is allocated."""
        return self.trace.peak.bytes if self.reserved is None else self.reserved.segments.reserved


@dataclass(frozen=True)
class Plan:
    """What is predicted of a run."""

    experiment: Experiment
    """The run, its layout resolved."""
    device: Device | None
    """What it would run on; None is a CPU."""
    ranks: list[RankPlan]
    """The pipeline ranks that were looked at."""
    bubble: float
    """Share of the time in which ranks of the pipeline wait for each other."""
    step_seconds: float | None
    """Time of a step; None where nothing is known of the device's speed."""
    flops_per_token: float
    """Operations of a training step per token, by which MFU is counted."""
    checkpoint_bytes: int
    """A checkpoint with the optimizer's state."""
    planning_seconds: float
    """What predicting took."""
    why_full: str = ""
    """Why every layer and micro-batch was traced although putting few together would be quicker; empty where that was
    done, would not be quicker, or was not wanted."""

    @cached_property
    def layout(self) -> ResolvedLayout:
        """Layout of the run."""
        return ResolvedLayout.of(self.experiment)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch."""
        return self.experiment.training.global_batch_size * self.experiment.training.seq_len

    @property
    def checkpoint_bytes_per_node(self) -> float:
        """What a node writes of a checkpoint; each of its processes writes its shards."""
        return self.checkpoint_bytes / self.layout.nodes

    @property
    def at_most(self) -> bool:
        """Whether tensors take at most what is predicted, since a kernel's workspace is known from above alone."""
        return device_type(self.experiment.cluster) == "cuda" and attention_kernel(self.experiment) == "efficient"

    @property
    def host_bytes_per_node(self) -> int | None:
        """Of a node's memory, what the tensors of its ranks take at their peaks where parameters are offloaded.

        Of the node with the most; None where nothing is offloaded, or some pipeline ranks were not looked at.
        """
        world, its = self.layout.world_size, {rank.pipeline_rank: rank.trace.host for rank in self.ranks}
        if len(its) < self.experiment.parallelism.pp or None in its.values():
            return None
        sizes = [host.peak.bytes for host in its.values() if host is not None]
        node, copies = node_size(self.experiment.cluster, world), world // self.experiment.parallelism.pp
        nodes = (range(first, min(first + node, world)) for first in range(0, world, node))
        return max(sum(sizes[rank // copies] for rank in ranks) for ranks in nodes)

    @property
    def tokens_per_second(self) -> float | None:
        """Of one device."""
        return self.step_seconds and self.tokens_per_step / self.step_seconds / self.layout.world_size

    @property
    def mfu(self) -> float | None:
        """Model operations over what the device's bf16 peak allows; a CPU has none worth dividing by."""
        if self.device is None or self.tokens_per_second is None or device_type(self.experiment.cluster) == "cpu":
            return None
        return self.tokens_per_second * self.flops_per_token / (self.device.bf16_tflops * 1e12)

    @property
    def gpu_hours(self) -> float | None:
        """Of the whole run."""
        seconds = self.step_seconds
        return seconds and seconds * self.experiment.training.steps * self.layout.world_size / 3600


def predict(
    experiment: Experiment,
    device: Device | None,
    pipeline_ranks: Collection[int] | None = None,
    on_rank: Callable[[int, FakeRank], None] | None = None,
    *,
    full: bool = False,
) -> Plan:
    """Predict a run.

    Args:
        experiment: the run, its layout resolved.
        device: what it runs on; None is a CPU of which no speed is known.
        pipeline_ranks: those that are looked at; None looks at all.
        on_rank: called with each pipeline rank and its fake rank before its step.
        full: trace every layer and micro-batch, also where those of small runs would be put together.

    Raises:
        UserError: something of it is not modelled.
    """
    began = time.perf_counter()
    cuda = device_type(experiment.cluster) == "cuda"
    check_supported(experiment)
    if cuda and device is not None:
        check_supported_on(experiment, device)
    traced = on_cpu(experiment) if cuda else experiment
    where = GPU if cuda and experiment.parallelism.cpu_offload else DEVICE
    layout = ResolvedLayout.of(experiment)
    node = layout.node_size if cuda else layout.world_size
    numbers = [it for it in range(traced.parallelism.pp) if pipeline_ranks is None or it in pipeline_ranks]
    tracer = _Tracer(traced, device if cuda else None, on_rank, cuda=cuda, where=where)
    with _instructions(device):
        traces = tracer.traces(numbers, full=full)
    plans, held, state = [], 0, 0
    for number, trace in zip(numbers, traces, strict=True):
        bf16 = experiment.training.mixed_precision == "bf16"
        seconds = None if device is None or (cuda and not bf16) else rank_time(trace, device, node)
        plans.append(
            RankPlan(number, trace, seconds, reservations(trace.setup_events, trace.step_events) if cuda else None)
        )
        for kept in (trace.persistent, {} if trace.host is None else trace.host.persistent):
            held, state = held + kept.get("parameters", 0), state + kept.get("optimizer", 0)
    bubble, step = step_time(experiment, [plan.time for plan in plans])
    # The optimizer's state is in the same proportion to the weights, whoever holds them.
    checkpoint = round(tracer.parameters * 4 * (1 + state / held))
    took = time.perf_counter() - began
    return Plan(experiment, device, plans, bubble, step, tracer.flops_per_token, checkpoint, took, tracer.why_full)


class _Tracer:
    """Traces of a run's ranks, put together or whole, and what the trainer says of its model."""

    def __init__(
        self,
        experiment: Experiment,
        device: Device | None,
        on_rank: Callable[[int, FakeRank], None] | None,
        *,
        cuda: bool,
        where: torch.device,
    ) -> None:
        self._experiment, self._on_rank, self._cuda, self._where = experiment, on_rank, cuda, where
        self._workspace = 0 if device is None else device.matmul_workspace
        self.parameters, self.flops_per_token, self.why_full = 0, 0.0, ""

    def traces(self, numbers: Sequence[int], *, full: bool) -> list[Trace]:
        """Those of pipeline ranks."""
        if not full and is_worthwhile(self._experiment, len(numbers)):
            self.why_full = unsupported_reason(self._experiment) or ""
            try:
                if not self.why_full:
                    return self._retold(numbers)
            except ExtrapolationError as error:
                self.why_full = f"small runs do not tell: {error}"
        return [self._whole(number) for number in numbers]

    def _retold(self, numbers: Sequence[int]) -> list[Trace]:
        retelling, found = TraceExtrapolator(self._experiment, self._cuda, self._workspace), list[Trace]()
        for number in numbers:
            found.append(retelling.trace(number))
            model = retelling.optimizer_step(number)
            self.parameters, self.flops_per_token = model.parameters, model.flops_per_token
        for number in numbers if self._on_rank is not None else ():
            with self._rank(number):
                pass
        return found

    def _whole(self, number: int) -> Trace:
        with self._rank(number) as it:
            built = it.state.built
            self.parameters, self.flops_per_token = built.parameters, built.flops_per_token
            return trace_step(
                it.state,
                it.step,
                warmup_step=it.warmup_step,
                preallocated=it.preallocated,
                batches=it.batches,
                cuda=self._cuda,
                inductor=uses_inductor(self._experiment.compile),
                matmul_workspace=self._workspace,
            )

    @contextmanager
    def _rank(self, number: int) -> Iterator[FakeRank]:
        rank = pipeline_ranks(self._experiment)[number]
        with fake_rank(self._experiment, rank, self._where) as it:
            if self._on_rank is not None:
                self._on_rank(number, it)
            yield it


def _instructions(device: Device | None) -> AbstractContextManager[None]:
    return nullcontext() if device is None else fake_cuda_capability(device.capability)


def on_cpu(experiment: Experiment) -> Experiment:
    """The same run where torch has no CUDA: the CPU's flash kernel keeps what flash and cuDNN's keep."""
    return replace(experiment, model=with_attention_backend(experiment.model, attention_kernel(experiment)))
