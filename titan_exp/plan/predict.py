"""Prediction of a run: traced or extrapolated steps of pipeline ranks, and a step time estimate."""

import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

from titan_exp.config.devices import device_type, usable_cores, uses_expandable_segments
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.pipeline_schedules import pipeline_seconds
from titan_exp.config.layout.resolved_layout import ResolvedLayout, share_of_world
from titan_exp.config.schema.foreign_code import import_paths
from titan_exp.models.spec.lookup import model_spec, with_key
from titan_exp.plan import evaluation
from titan_exp.plan.caching_allocator import Reserved, steady_reserved
from titan_exp.plan.devices import Device, room_of
from titan_exp.plan.extrapolate.eligibility import is_worthwhile, unsupported_reason
from titan_exp.plan.extrapolate.extrapolated_trace import TraceExtrapolator
from titan_exp.plan.extrapolate.schedule import ExtrapolationError
from titan_exp.plan.fake_kernels import deterministic_attention, fake_cuda_capability
from titan_exp.plan.planner_processes import Call, PlannerProcesses, no_garbage_collection
from titan_exp.plan.prediction import (
    Exchange,
    Prediction,
    RankPrediction,
    RankTime,
    attention_kernel,
    check_supported,
    exchange_of,
    with_run_kernels,
)
from titan_exp.plan.roofline import ClassTime, class_times, pipeline_bubble, rank_time
from titan_exp.plan.trace.op_costs import assume_expert_load
from titan_exp.plan.trace.torch_patches import uses_inductor
from titan_exp.plan.trace.trace_step import FakeRank, Trace, fake_rank, pipeline_ranks

T = TypeVar("T")
NUMBER = 4  # bytes of an fp32 number


@dataclass(frozen=True)
class RankPlan:
    """Prediction for one pipeline rank, identical on all ranks of its stage."""

    pipeline_rank: int
    trace: Trace
    time: RankTime | None  # step time; None if rates are unknown
    allocator: Reserved | None
    """Statistics of the allocator with the run's segments, within the device's memory if it fits; None on a CPU."""
    expandable: bool
    kernels: Sequence[ClassTime]
    saved: int
    evaluations: Sequence[evaluation.EvaluationTrace] = ()
    """Evaluations of the run, whose memory `trace` counts; empty if they are not planned."""

    @property
    def sent(self) -> int:
        """Bytes of activations sent in a step. Sends count as live until their pass ends, because the host frees them
        and may run that far ahead of the GPU."""
        messages = self.trace.costs.messages.items()
        return sum(size for (axis, kind), size in messages if kind == "send" and "pp" in axis.split("="))

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Messages of a step by mesh axis and kind, as JSON values."""
        calls, messages = self.trace.costs.calls, self.trace.costs.messages.items()
        return [{"axis": at[0], "kind": at[1], "bytes": size, "calls": calls[at]} for at, size in messages]

    @property
    def bytes(self) -> int:
        """Peak of reserved memory, else of allocated memory, in bytes."""
        return self.trace.peak.bytes if self.allocator is None else self.allocator.reserved

    @property
    def other_segments(self) -> int:
        """Bytes that the allocator reserves with the other kind of segments, without a limit."""
        events = self.trace.setup_events, self.trace.step_events
        return steady_reserved(*events, expandable=not self.expandable).reserved

    @property
    def prediction(self) -> RankPrediction:
        """Prediction, without its trace."""
        peak, allocator = self.trace.peak, self.allocator
        reserved, retries = (None, 0) if allocator is None else (allocator.reserved, allocator.retries)
        return RankPrediction(
            self.pipeline_rank,
            allocated=peak.bytes,
            reserved=reserved,
            by_category=peak.by_category,
            during=peak.where,
            seconds=self.time,
            operators=self.trace.costs.operators,
            saved=self.saved,
            retries=retries,
        )


@dataclass(frozen=True)
class EvaluationPlan:
    """Prediction of one kind of evaluation."""

    kind: evaluation.Evaluated
    pass_seconds: float | None  # time of a pass; None if rates are unknown
    bytes: int  # peak of allocated memory, of the rank that needs the most
    where: str

    @cached_property
    def passes(self) -> int | str:
        """Passes of an evaluation, or the reason why their number is unknown."""
        passes = self.kind.passes()
        averaged = 1 + self.kind.experiment.weight_average.enabled
        return passes if isinstance(passes, str) else passes * averaged

    @property
    def seconds(self) -> float | None:
        """Seconds of an evaluation; None if unknown."""
        return None if self.pass_seconds is None or isinstance(self.passes, str) else self.pass_seconds * self.passes


@dataclass(frozen=True)
class Plan:
    """Prediction of a run with the traces of its ranks."""

    experiment: Experiment
    device: Device | None  # device; None for a CPU of unknown speed
    ranks: list[RankPlan]
    bubble: float
    step_seconds: float | None
    flops_per_token: float
    checkpoint_bytes: int
    planning_seconds: float
    why_full: str = ""
    """Reason why a large run is traced in full; empty if extrapolated, requested, or if a full trace was as fast."""
    worst_bytes: int | None = None
    """`RankPlan.bytes` of the largest rank if its experts receive `plan.worst_expert_load` times the mean rows; None if
    not requested, or if it changes nothing."""

    evaluations: Sequence["EvaluationPlan"] = ()

    @cached_property
    def exchange(self) -> Exchange:
        """Exchange between the worlds of the run."""
        return exchange_of(self.experiment)

    @cached_property
    def layout(self) -> ResolvedLayout:
        """Layout of one world, with its share of a step."""
        return ResolvedLayout.of(share_of_world(self.experiment))

    @property
    def prediction(self) -> Prediction:
        """Prediction, without its traces."""
        ranks = tuple(rank.prediction for rank in self.ranks)
        passes = {one.kind.name: one.pass_seconds for one in self.evaluations if one.pass_seconds is not None}
        unknown = tuple(dict.fromkeys(name for rank in self.ranks for name in rank.trace.costs.unknown))
        return Prediction(ranks, self.bubble, self.step_seconds, self.tokens_per_second, self.mfu, passes, unknown)

    @property
    def weights(self) -> dict[int, int]:
        """Bytes of parameters on the device, by predicted pipeline rank."""
        return {rank.pipeline_rank: rank.trace.persistent["parameters"] for rank in self.ranks}

    @property
    def is_whole(self) -> bool:
        """True if every pipeline rank is predicted."""
        return len(self.ranks) == self.experiment.parallelism.pp

    def verdict(self, *, fits: bool) -> str:
        """Verdict on the memory: an upper bound that is too large leaves it open, and so do some ranks that fit."""
        if not fits:
            return "may not fit" if self.at_most else "does not fit"
        return "fits" if self.is_whole else "the planned ranks fit"

    @property
    def largest(self) -> RankPlan:
        """Predicted pipeline rank that needs the most memory."""
        return max(self.ranks, key=lambda rank: rank.bytes)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch once the batch ramp has ended."""
        return self.experiment.training.global_batch_size * self.experiment.training.seq_len

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        training = self.experiment.training
        return training.sequences_after(training.last_step) * training.seq_len

    @property
    def checkpoint_bytes_per_node(self) -> float:
        """Checkpoint bytes written by each node."""
        return self.checkpoint_bytes / self.layout.nodes

    @property
    def at_most(self) -> bool:
        """True if the prediction is an upper bound, because the attention workspace is only known to a bound."""
        return self.layout.device_type == "cuda" and attention_kernel(self.experiment) == "efficient"

    @property
    def host_bytes_per_node(self) -> int | None:
        """Largest host memory of offloaded tensors on any node; None without offload, or with ranks not predicted."""
        sizes = [rank.trace.host.peak.bytes for rank in self.ranks if rank.trace.host is not None]
        if len(sizes) < self.experiment.parallelism.pp:
            return None
        node, of_stage = self.layout.node_size, self.layout.world_size // self.experiment.parallelism.pp
        by_rank = [size for size in sizes for _ in range(of_stage)]
        return max(sum(by_rank[first : first + node]) for first in range(0, len(by_rank), node))

    @property
    def tokens_per_second(self) -> float | None:
        """Throughput per device."""
        return self.step_seconds and self.tokens_per_step / self.step_seconds / self.layout.devices

    @property
    def why_no_time(self) -> str:
        """Reason why the step time is unknown; empty if it is known."""
        if self.step_seconds is not None:
            return ""
        if self.layout.device_type == "cuda":
            return "there is no speed model for fp32 on GPUs. Use training.mixed_precision=bf16"
        if self.experiment.cluster.is_remote:
            return "there is no speed model for the CPUs of a cluster"
        return "we do not know how fast this machine is. Measure it with titan-exp doctor"

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over the device's bf16 peak; None on a CPU."""
        if self.device is None or self.tokens_per_second is None or self.layout.device_type == "cpu":
            return None
        return self.tokens_per_second * self.flops_per_token / (self.device.bf16_tflops * 1e12)

    @property
    def gpu_hours(self) -> float | None:
        """Device-hours of the whole run, at the throughput after the batch ramp, with evaluations of known length."""
        seconds = self.step_seconds
        if seconds is None:
            return None
        steps = seconds * self.tokens / self.tokens_per_step
        return (steps + (self.evaluation_seconds or 0.0)) * self.layout.devices / 3600

    @cached_property
    def evaluation_times(self) -> int:
        """Number of evaluations in the run."""
        return evaluation.evaluations_of(self.experiment)

    @cached_property
    def evaluation_seconds(self) -> float | None:
        """Seconds of all evaluations of known length; None if the time of a pass is unknown."""
        if any(one.pass_seconds is None for one in self.evaluations):
            return None
        return self.evaluation_times * sum(one.seconds or 0.0 for one in self.evaluations)


def predict(
    experiment: Experiment,
    device: Device | None,
    pipeline_ranks: Collection[int] | None = None,
    *,
    full: bool = False,
    falls_back: bool = True,
    worst_load: bool = False,
    cores: int | None = None,
    evaluates: bool = True,
) -> Plan:
    """Predict a run with a resolved layout; `device` is None for a CPU of unknown speed.

    `pipeline_ranks` defaults to all. `full` traces every layer and micro-batch instead of extrapolating. A run that
    cannot be extrapolated is traced in full, too; with `falls_back=False`, it raises ExtrapolationError. With
    `worst_load`, the largest rank is also predicted with `plan.worst_expert_load`. Several ranks are predicted on
    `cores` cores, by default all. With `evaluates`, evaluations are planned, too.
    Raises UserError if an option of the run is not supported.
    """
    began, layout = time.perf_counter(), ResolvedLayout.of(share_of_world(experiment))
    cuda, exchange = layout.device_type == "cuda", exchange_of(experiment)
    check_supported(experiment, device)
    if cuda and device is not None:
        device = with_run_kernels(device, experiment)
    room = room_of(layout, model_spec(experiment.model), device) if cuda and device is not None else None
    rated = None if cuda and experiment.training.mixed_precision == "fp32" else device
    expandable = uses_expandable_segments(experiment.cluster, experiment.compile)
    numbers = [rank for rank in range(layout.parallelism.pp) if pipeline_ranks is None or rank in pipeline_ranks]
    # This process works, too, so the pool has one fewer.
    processes = PlannerProcesses(min(len(numbers), usable_cores() if cores is None else cores) - 1)
    kinds = evaluation.evaluated(experiment) if evaluates else []
    traces = partial(_traces, experiment, device, processes=processes, full=full, falls_back=falls_back)

    def replay(trace: Trace) -> Call[Reserved] | None:
        events = trace.setup_events, trace.step_events
        return processes.replay(*events, expandable=expandable, capacity=room) if cuda else None

    def rank_plan(number: int, traced: _Traced, replayed: Call[Reserved] | None) -> RankPlan:
        trace, seconds = traced.trace, None
        weights, state = _state(trace)
        if rated is not None:
            seconds = rank_time(trace.costs, trace.axes, rated, layout.node_size if cuda else layout.world_size)
            waited = exchange.seconds(trace.persistent["parameters"], rated, seconds.total)
            seconds = replace(seconds, exchange=waited)
        kernels, allocator = class_times(trace.costs, rated), None if replayed is None else replayed.result()
        saved = round(weights * exchange.saved_numbers(state / max(1, weights)))
        if not cuda:
            trace = replace(trace, peak=exchange.peak_on_cpu(trace.peak, trace.persistent, trace.gradients))
        return RankPlan(number, trace, seconds, allocator, expandable, kernels, saved, traced.evaluations)

    load, worst = experiment.plan.worst_expert_load, None
    with _assumptions(experiment, device), no_garbage_collection(), processes:
        found = {number: (traced, replay(traced.trace)) for number, traced in traces(numbers, kinds)}
        # The last comes first: the pool replays from the first on, and this process those that no other has begun.
        plans = [rank_plan(number, traced, call) for number, (traced, call) in reversed(found.items())][::-1]
        if worst_load and load > 1 and experiment.parallelism.ep > 1:
            largest = max(plans, key=lambda plan: plan.bytes).pipeline_rank
            with assume_expert_load(load):
                ((_, traced),) = traces([largest], ())
            worst = rank_plan(largest, traced, replay(traced.trace)).bytes
    weights, state = (sum(part) for part in zip(*(_state(plan.trace) for plan in plans), strict=True))
    # Optimizer state is proportional to the weights of every rank.
    model, _ = found[numbers[-1]]
    checkpoint = round(model.parameters * NUMBER * exchange.saved_numbers(state / weights))
    bubble = pipeline_bubble(layout)
    times = {plan.pipeline_rank: plan.time.total for plan in plans if plan.time is not None}
    step = pipeline_seconds(times, layout.parallelism.pp, bubble) if times else None
    took = time.perf_counter() - began
    whole = model.flops_per_token, checkpoint, took, model.why_full, worst
    return Plan(experiment, device, plans, bubble, step, *whole, _evaluations(kinds, plans, layout, rated))


def _evaluations(
    kinds: Sequence[evaluation.Evaluated], ranks: Sequence[RankPlan], layout: ResolvedLayout, device: Device | None
) -> list[EvaluationPlan]:
    """Evaluations of a run: the slowest rank sets the time, and a pipeline fills and drains in every pass."""
    found, node = [], layout.node_size if layout.device_type == "cuda" else layout.world_size
    filled = layout.pipeline_microbatches if layout.parallelism.pp > 1 else 1
    bubble = (filled + layout.parallelism.pp - 1) / filled
    for place, kind in enumerate(kinds):
        traces = [(rank, rank.evaluations[place]) for rank in ranks]
        seconds = None
        if device is not None:
            seconds = bubble * max(rank_time(one.costs, one.axes, device, node).total for _, one in traces)
        sizes = [(sum(rank.trace.persistent.values()) + one.passing.bytes, one.passing.where) for rank, one in traces]
        found.append(EvaluationPlan(kind, seconds, *max(sizes)))
    return found


def _state(trace: Trace) -> tuple[int, int]:
    device, host = trace.persistent, {} if trace.host is None else trace.host.persistent
    return device["parameters"] + host.get("parameters", 0), device["optimizer"] + host.get("optimizer", 0)


class _Traced(NamedTuple):
    """Trace of a pipeline rank, with values of the whole model."""

    trace: Trace
    parameters: int
    flops_per_token: float
    why_full: str
    evaluations: Sequence[evaluation.EvaluationTrace]


def _traces(
    experiment: Experiment,
    device: Device | None,
    numbers: Sequence[int],
    kinds: Sequence[evaluation.Evaluated],
    processes: PlannerProcesses,
    *,
    full: bool,
    falls_back: bool,
) -> Iterator[tuple[int, _Traced]]:
    """Yield pipeline ranks with their traces, each as soon as it is ready; all come anew if one cannot be extrapolated.
    `processes` trace optimizer steps while this one traces samples."""
    traced, why_full = as_traced(experiment, device), ""
    layout = ResolvedLayout.of(traced)
    cuda = layout.device_type == "cuda"
    workspace = device.matmul_workspace if cuda and device is not None else 0
    options = {"cuda": cuda, "inductor": uses_inductor(traced.compile), "matmul_workspace": workspace}

    if not full and is_worthwhile(layout, traced.activation_checkpoint, len(numbers)):
        why_full = unsupported_reason(traced) or ""
        try:
            if not why_full:
                extrapolator = TraceExtrapolator(traced, cuda, workspace)
                if not import_paths(experiment):
                    extrapolator.trace_optimizer_steps(numbers, partial(processes.call, _assuming, experiment, device))
                evaluations = evaluation.extrapolate_evaluations(traced, numbers, kinds, options) if kinds else {}
                for number in numbers:
                    trace, model = extrapolator.trace(number), extrapolator.optimizer_step(number)
                    whole = model.parameters, model.flops_per_token, ""
                    own = evaluations.get(number, ())
                    yield number, _Traced(evaluation.with_evaluations(trace, own), *whole, own)
                return
        except ExtrapolationError as error:
            if not falls_back:
                raise
            why_full = f"we cannot extrapolate it: {error}"
    for number in numbers:
        with fake_rank(traced, pipeline_ranks(layout)[number]) as rank:
            trace = rank.trace(beside=rank.exchanges, **options)
            own, model = evaluation.trace_evaluations(rank, kinds, options), rank.state.built
        whole = model.parameters, model.flops_per_token, why_full
        yield number, _Traced(evaluation.with_evaluations(trace, own), *whole, own)


@contextmanager
def traced_rank(experiment: Experiment, device: Device | None, pipeline_rank: int) -> Iterator[FakeRank]:
    """Build a pipeline rank as it is traced for a device, in the `with` block."""
    experiment = as_traced(experiment, device)
    rank = pipeline_ranks(ResolvedLayout.of(experiment))[pipeline_rank]
    with _assumptions(experiment, device), fake_rank(experiment, rank) as fake:
        yield fake


@contextmanager
def _assumptions(experiment: Experiment, device: Device | None) -> Iterator[None]:
    capability = nullcontext() if device is None else fake_cuda_capability(device.capability)
    deterministic = experiment.training.deterministic
    with capability, deterministic_attention(device.multiprocessors if device and deterministic else None):
        yield


def _assuming(experiment: Experiment, device: Device | None, call: Callable[[], T]) -> T:
    with _assumptions(experiment, device), no_garbage_collection():
        return call()


def as_traced(experiment: Experiment, device: Device | None) -> Experiment:
    """Run of one world, as it is traced. For CUDA, the CPU's flash kernel replaces CUDA's flash and cuDNN kernels,
    since it saves the same tensors; lists of saved operators name it as well."""
    traced = share_of_world(experiment)
    if device_type(traced.cluster) != "cuda":
        return traced
    traced = replace(traced, model=with_key(traced.model, "attention_backend", attention_kernel(traced)))
    kernel = None if device is None else with_run_kernels(device, experiment).kernel
    if kernel not in ("flash", "cudnn"):
        return traced
    own = re.compile(rf"aten\._scaled_dot_product_{kernel}_attention(?:\.default)?(?=/|$)")
    checkpointing = traced.activation_checkpoint
    save = [own.sub("aten._scaled_dot_product_flash_attention_for_cpu", entry) for entry in checkpointing.save]
    return replace(traced, activation_checkpoint=replace(checkpointing, save=save))
