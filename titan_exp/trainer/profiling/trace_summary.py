"""Trace summary: time shares of GEMMs, attention, communication, optimizer and idle time in a profiled window.

On CUDA the time of kernels on the device's streams; on a CPU the self time of operators.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch.autograd import DeviceType
from torch.profiler import profile

from titan_exp.tracking.run_folder.atomic_write import write_atomically
from titan_exp.trainer.profiling.kernel_categories import KINDS, TITLES, Kind, kind_of
from titan_exp.trainer.profiling.overlap import Span, TimeShares, time_shares

LONGEST = 10
"""Number of kernels or operators that a summary lists."""
PHASE = "titan_exp: "
"""Prefix of the ranges that mark phases of a step; they are no work of their own."""
IDLE = {"cuda": "idle: no kernel ran", "cpu": "outside operators: Python, waiting"}
"""Title of the idle share, by device."""


@dataclass(frozen=True)
class NamedTime:
    """Total self time of one kernel or operator in a window."""

    name: str
    """Name in the profile."""
    kind: Kind
    """Category."""
    seconds: float
    """Self time."""
    calls: int
    """Number of calls."""


@dataclass(frozen=True)
class ProfileSummary:
    """Time shares of a window of steps on one rank."""

    device: str
    """`cuda` (kernels) or `cpu` (operators)."""
    first_step: int
    """First step of the window."""
    last_step: int
    """Last step of the window."""
    seconds: float
    """Length of the window; profiling slows steps, most of all those with small operators."""
    shares: dict[str, float]
    """Shares of the window by category, and `idle`; they add up to 1. Communication counts only where exposed."""
    hidden_communication: float
    """Share of the window in which communication overlapped with computation."""
    longest: tuple[NamedTime, ...]
    """Kernels or operators with the longest self time."""

    def line(self) -> str:
        """All shares on one line."""
        parts = [f"{TITLES[kind]} {_percent(self.shares[kind])}" for kind in KINDS]
        hidden = f", and {_percent(self.hidden_communication)} hidden" if self.hidden_communication else ""
        return (
            f"{', '.join(parts)} (communication exposed{hidden}), {IDLE[self.device]} {_percent(self.shares['idle'])}"
        )

    def text(self) -> str:
        """A table of shares, then the longest kernels or operators."""
        timed = "kernels on the device" if self.device == "cuda" else "operators on the CPU (self time)"
        lines = [
            f"steps {self.first_step} to {self.last_step}: {self.seconds:.3f} s, by the time of {timed}",
            "",
            *(f"  {_percent(self.shares[kind]):>7}  {TITLES[kind]}" for kind in KINDS),
            f"  {_percent(self.shares['idle']):>7}  {IDLE[self.device]}",
            "",
            f"Communication is exposed communication; another {_percent(self.hidden_communication)} overlapped.",
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
        lane = (
            number if event.is_async else (event.device_index, event.device_resource_id if on_device else event.thread)
        )
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
