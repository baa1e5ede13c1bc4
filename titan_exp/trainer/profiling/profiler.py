"""Profile of a window of steps with torch's profiler: a trace file per rank, and a summary of its time shares. On CUDA
it is the time of kernels on the device's streams, on a CPU the self time of operators."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from titan_exp.config.groups.run import ProfilingConfig
from titan_exp.config.layout.pipeline_schedules import Action
from titan_exp.parallel.step_observer import StepObserver, observe_steps
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.run_folder.files import write_atomically
from titan_exp.trainer.part import Part, Run, Step

Kind = Literal["gemm", "attention", "communication", "optimizer", "other"]
TITLES: dict[Kind, str] = {
    "gemm": "GEMM",
    "attention": "attention",
    "communication": "communication",
    "optimizer": "optimizer and clipping",
    "other": "elementwise and other",
}
"""Titles of categories, in the order of the summary."""

# The first match decides, so that rarer categories come first ("flash_fwd ... gemm").
TABLE: tuple[tuple[Kind, str], ...] = (
    # NCCL's and gloo's own, c10d's operators, functional collectives, FSDP2's copies in and out of its buffers.
    ("communication", r"nccl|gloo:|c10d::|c10d_functional|record_param_comms|one_shot_all_reduce|two_shot_all_reduce"),
    (
        "communication",
        r"FSDP::|fsdp::(all_gather_copy_in|split_with_sizes_copy|chunk_cat)|AllGather|ReduceScatter|AllReduce",
    ),
    # torch.optim's annotations and kernels; the norm over all gradients and their scaling.
    ("optimizer", r"Optimizer\.(step|zero_grad)#|FusedAdam|fused_adam|multi_tensor_apply|_foreach_|adamw?_kernel"),
    ("optimizer", r"^clip_grad|clip_and_adamw|low_precision_adamw"),
    # SDPA's operators; flash, cuDNN, memory-efficient and FlexAttention kernels.
    (
        "attention",
        r"scaled_dot_product|FlashAttn|flash_attention|efficient_attention|cudnn_attention|flash_(fwd|bwd)|fmha",
    ),
    (
        "attention",
        r"cudnn.*sdpa|sdpa.*cudnn|flex_attention|FlexAttention|attention_(forward|backward)|varlen_attn|mha_",
    ),
    # Operators; cuBLAS, cuBLASLt (nvjet), CUTLASS, oneDNN, MKL; Triton's templates of matmuls.
    ("gemm", r"aten::_?(addmm|mm|bmm|baddbmm|addbmm|matmul|linear|addmv|mv|dot|grouped_mm|scaled_mm)(_|\b)"),
    ("gemm", r"_scaled_grouped_mm|_int_mm|_addmm_activation|mkl_linear|mkldnn_linear|onednn|linear_pointwise"),
    ("gemm", r"gemm|nvjet|cutlass|xmma|cublas|splitKreduce|triton_(tem|mm)_|_mm_|\bmm_|Cijk_|_scaled_mm"),
)
"""Regular expressions of each category, searched in the name."""


@cache
def kind_of(name: str) -> Kind:
    """Category of a kernel, operator or annotation by its name."""
    for kind, pattern in TABLE:
        if re.search(pattern, name):
            return kind
    return "other"


@dataclass(frozen=True)
class Span:
    """A kernel, operator or annotation on a timeline."""

    name: str
    kind: Kind
    begin: float
    end: float
    lane: object  # thread or stream; spans of a lane are nested or disjoint
    runs: bool = True
    """True if the span is work; False for an annotation, which only gives its category to the spans inside it."""


@dataclass(frozen=True)
class TimeShares:
    """Time shares of a window; the five categories and `idle` add up to it."""

    window: float
    spent: dict[Kind, float]
    """Time by category. Communication counts only where exposed; lanes that compute at once share the time evenly."""
    hidden: float  # time of communication that overlapped with computation
    idle: float


class _Segment(NamedTuple):
    begin: float
    end: float
    kind: Kind


def time_shares(spans: Iterable[Span], window: tuple[float, float]) -> TimeShares:
    """Divide a window, given by its begin and end, among the spans, which are clipped to it."""
    first, last = window
    events: list[tuple[float, int, Kind]] = []
    for segment in innermost(spans):
        begin, end = max(segment.begin, first), min(segment.end, last)
        if begin < end:
            events.append((begin, 1, segment.kind))
            events.append((end, -1, segment.kind))
    running: dict[Kind, int] = dict.fromkeys(TITLES, 0)
    spent: dict[Kind, float] = dict.fromkeys(TITLES, 0.0)
    hidden = idle = 0.0
    now = first
    for when, change, kind in sorted(events):
        length, now = when - now, when
        computing: dict[Kind, int] = {name: n for name, n in running.items() if n and name != "communication"}
        total = sum(computing.values())
        for name, count in computing.items():
            spent[name] += length * count / total
        if running["communication"] and computing:
            hidden += length
        elif running["communication"]:
            spent["communication"] += length
        elif not computing:
            idle += length
        running[kind] += change
    return TimeShares(last - first, spent, hidden, idle + last - now)


def innermost(spans: Iterable[Span]) -> list[_Segment]:
    """Cut lanes into segments by category of the innermost span; `other` spans take that of the span around."""
    lanes: dict[object, list[Span]] = defaultdict(list)
    for span in spans:
        lanes[span.lane].append(span)
    return [segment for lane in lanes.values() for segment in _flat(lane)]


def _flat(lane: Sequence[Span]) -> list[_Segment]:
    """Flatten the nested spans of a lane."""
    segments: list[_Segment] = []
    open_spans: list[tuple[float, Kind, bool]] = []  # end, kind, runs
    now = 0.0

    def until(when: float) -> None:
        """Assign the time up to `when` to the open spans, innermost first."""
        nonlocal now
        while open_spans and open_spans[-1][0] <= when:
            end, kind, runs = open_spans.pop()
            if runs and end > now:
                segments.append(_Segment(now, end, kind))
            now = max(now, end)
        if open_spans and open_spans[-1][2] and when > now:
            segments.append(_Segment(now, when, open_spans[-1][1]))
        now = max(now, when)

    for span in sorted(lane, key=lambda span: (span.begin, -span.end)):
        until(span.begin)
        outer = open_spans[-1] if open_spans else None
        kind: Kind = outer[1] if outer is not None and outer[1] != "other" else span.kind
        # Clocks round: a span cannot outlast the span around it.
        open_spans.append((span.end if outer is None else min(span.end, outer[0]), kind, span.runs))
    until(max((span.end for span in lane), default=0.0))
    return segments


LONGEST = 10  # number of kernels or operators that a summary lists
PHASE = "titan_exp: "  # prefix of the ranges that mark phases of a step; they are not work of their own
IDLE = {"cuda": "idle: no kernel ran", "cpu": "outside operators: Python, waiting"}
"""Title of the idle share, by device."""


@dataclass(frozen=True)
class NamedTime:
    """Total self time of one kernel or operator in a window."""

    name: str
    kind: Kind
    seconds: float
    calls: int


@dataclass(frozen=True)
class ProfileSummary:
    """Time shares of a window of steps on one rank."""

    device: str  # `cuda` (kernels) or `cpu` (operators)
    first_step: int
    last_step: int
    seconds: float  # length of the window; profiling slows steps, most of all those with small operators
    shares: dict[str, float]
    """Shares of the window by category, and `idle`; they add up to 1. Communication counts only where exposed."""
    hidden_communication: float  # share of the window in which communication overlapped with computation
    longest: tuple[NamedTime, ...]  # kernels or operators with the longest self time

    def line(self) -> str:
        """All shares on one line."""
        parts = [f"{title} {_percent(self.shares[kind])}" for kind, title in TITLES.items()]
        hidden = f", and {_percent(self.hidden_communication)} hidden" if self.hidden_communication else ""
        idle = f"{IDLE[self.device]} {_percent(self.shares['idle'])}"
        return f"{', '.join(parts)} (communication exposed{hidden}), {idle}"

    def text(self) -> str:
        """A table of shares, then the longest kernels or operators."""
        timed = "kernels on the device" if self.device == "cuda" else "operators on the CPU (self time)"
        lines = [
            f"steps {self.first_step} to {self.last_step}: {self.seconds:.3f} s, by the time of {timed}",
            "",
            *(f"  {_percent(self.shares[kind]):>7}  {title}" for kind, title in TITLES.items()),
            f"  {_percent(self.shares['idle']):>7}  {IDLE[self.device]}",
            "",
            f"Communication is exposed communication. Another {_percent(self.hidden_communication)} overlapped.",
            "",
            *(
                f"  {1e3 * entry.seconds:10.3f} ms  {entry.calls:6d} x  {TITLES[entry.kind]:22s}  {entry.name[:120]}"
                for entry in self.longest
            ),
        ]
        return "\n".join(lines) + "\n"

    def write(self, folder: Path, rank: int) -> Path:
        """Write `summary-rank-*.txt` and `.json`; returns the path of the text file."""
        text = folder / f"summary-rank-{rank:05d}.txt"
        write_atomically(text, self.text(), durable=False)
        write_atomically(text.with_suffix(".json"), json.dumps(asdict(self), indent=1) + "\n", durable=False)
        return text


def summarize_profile(profiler: profile, *, device: str, first_step: int, last_step: int) -> ProfileSummary:
    """Summarize a stopped profiler; for `device="cuda"` it must have recorded CUDA activities."""
    events = profiler.events() or []
    spans: list[Span] = []
    begin, end = float("inf"), 0.0
    for number, event in enumerate(events):
        start, stop = float(event.time_range.start), float(event.time_range.end)
        on_device = event.device_type != DeviceType.CPU
        if not event.is_async:
            begin, end = min(begin, start), max(end, stop)
        if on_device != (device == "cuda"):
            continue
        # Asynchronous events on a CPU (gloo's transfers) are not nested: each gets its own lane.
        stream = event.device_resource_id if on_device else event.thread
        lane = number if event.is_async else (event.device_index, stream)
        annotation = on_device and bool(getattr(event, "is_user_annotation", False))
        runs = not annotation and not event.name.startswith(PHASE)
        spans.append(Span(event.name, kind_of(event.name), start, stop, lane, runs=runs))
    window = (begin, end) if spans else (0.0, 0.0)
    return summary_of(spans, window, device=device, first_step=first_step, last_step=last_step)


def summary_of(
    spans: Sequence[Span], window: tuple[float, float], *, device: str, first_step: int, last_step: int
) -> ProfileSummary:
    """Summarize spans and a window in microseconds."""
    found: TimeShares = time_shares(spans, window)
    length = found.window or 1.0
    shares: dict[str, float] = {kind: spent / length for kind, spent in found.spent.items()}
    shares["idle"] = found.idle / length
    return ProfileSummary(
        device=device,
        first_step=first_step,
        last_step=last_step,
        seconds=found.window / 1e6,
        shares=shares,
        hidden_communication=found.hidden / length,
        longest=tuple(_longest(spans)),
    )


def _longest(spans: Sequence[Span]) -> list[NamedTime]:
    own: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    lanes: dict[object, list[Span]] = defaultdict(list)
    for span in spans:
        if span.runs:
            lanes[span.lane].append(span)
    for lane in lanes.values():
        outer: list[Span] = []
        for span in sorted(lane, key=lambda span: (span.begin, -span.end)):
            while outer and outer[-1].end <= span.begin:
                outer.pop()
            own[span.name] += span.end - span.begin
            calls[span.name] += 1
            if outer:
                own[outer[-1].name] -= min(span.end, outer[-1].end) - span.begin
            outer.append(span)
    names = sorted(own, key=lambda name: -own[name])[:LONGEST]
    return [NamedTime(name, kind_of(name), own[name] / 1e6, calls[name]) for name in names]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


class PhaseMarker(StepObserver):
    """Marks micro-batches, pipeline actions, gradient reduction and optimizer as ranges of the trace."""

    def __init__(self) -> None:
        self._range: record_function | None = None

    def microbatch_begin(self, index: int) -> None:
        self._begin(f"micro-batch {index}")

    def action_begin(self, action: Action) -> None:
        self._begin(f"{action.kind} stage {action.stage} micro-batch {action.microbatch}")

    def action_end(self, action: Action, result: torch.Tensor | None) -> None:
        """Leave the communication between actions unmarked."""
        self.end()

    def stage_reduction_begin(self, stage: int) -> None:
        self._begin(f"reduce gradients of stage {stage}")

    def gradients_ready(self, parts: object) -> None:
        self._begin("clip and optimizer")

    def end(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
        self._range = None

    def _begin(self, phase: str) -> None:
        self.end()
        self._range = record_function(PHASE + phase)
        self._range.__enter__()


class ProfileWindow(Part):
    """Profiles `profiling.steps` steps, from `profiling.start` steps after this attempt's beginning."""

    name = "profile"
    isolated = False  # it runs nothing of a model's

    def __init__(self, config: ProfilingConfig, folder: Path, device: torch.device) -> None:
        self.config, self.folder, self.rank, self.device = config, folder, torch.distributed.get_rank(), device
        self._profiler: profile | None = None
        self._stack = ExitStack()

    def begin(self, run: Run) -> None:
        self.first = run.first_step + self.config.start

    def before(self, step: int) -> None:
        """Start the profiler at the first step of the window, and mark every step in it."""
        if step == self.first + 1:
            activities = [ProfilerActivity.CPU]
            if self.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(activities=activities, record_shapes=True, profile_memory=True, acc_events=True)
            self._profiler.start()
        if self._profiler is not None:
            marker = PhaseMarker()
            self._stack.callback(marker.end)
            self._stack.enter_context(observe_steps(marker))

    def refused(self, step: int) -> None:
        """End the trace ranges of a step that is repeated."""
        self._stack.close()

    def after(self, step: Step) -> None:
        self._stack.close()
        if self._profiler is not None and step.step >= self.first + self.config.steps:
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            try:
                self._write(profiler, step.step)
            except OSError as error:
                # A failing instrument does not end a run.
                get_logger().error("cannot write the trace to %s (%s)", self.folder, error.strerror or error)

    def _write(self, profiler: profile, step: int) -> None:
        first = self.first + 1
        self.folder.mkdir(exist_ok=True)
        target = self.folder / f"steps-{first}-{step}-rank-{self.rank:05d}.json"
        profiler.export_chrome_trace(str(target))
        get_logger().info("trace of steps %d to %d: %s", first, step, target)
        summary = summarize_profile(profiler, device=self.device.type, first_step=first, last_step=step)
        written = summary.write(self.folder, self.rank)
        get_logger().info("steps %d to %d: %s; %s", first, step, summary.line(), written)
