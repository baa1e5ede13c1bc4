"""Time shares of overlapping spans: each instant counts for what runs then, with hidden communication apart.

Pure arithmetic on intervals, in any unit of time; what the spans are is `trainer.profile_summary`'s business.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from titan_exp.trainer.profiling.kernel_categories import KINDS, Kind


@dataclass(frozen=True)
class Span:
    """Something that ran."""

    name: str
    """Kernel, operator or annotation."""
    kind: Kind
    """What it does, by its name."""
    begin: float
    """When it began."""
    end: float
    """When it ended."""
    lane: object
    """Thread or stream; spans of a lane lie within each other or apart."""
    runs: bool = True
    """Whether the lane works while nothing lies within this span; an annotation on a stream says only whose the
    kernels are."""


@dataclass(frozen=True)
class TimeShares:
    """Time shares of a window; the five kinds and `idle` add up to it."""

    window: float
    """Length of the window."""
    spent: dict[Kind, float]
    """Time by kind. Of communication only what is exposed: nothing else ran meanwhile. Instants at which several
    lanes compute are divided evenly among them."""
    hidden: float
    """Time of communication while something else computed, which is counted there."""
    idle: float
    """Time in which nothing ran."""


@dataclass(frozen=True)
class _Segment:
    begin: float
    end: float
    kind: Kind


def time_shares(spans: Iterable[Span], window: tuple[float, float]) -> TimeShares:
    """Divide a window among what ran in it.

    Args:
        spans: in any order; what lies outside the window is cut off.
        window: its begin and end.
    """
    first, last = window
    events: list[tuple[float, int, Kind]] = []
    for segment in innermost(spans):
        begin, end = max(segment.begin, first), min(segment.end, last)
        if begin < end:
            events.append((begin, 1, segment.kind))
            events.append((end, -1, segment.kind))
    running: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    spent: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
    hidden = idle = 0.0
    now = first
    for when, change, kind in sorted(events):
        length, now = when - now, when
        computing: dict[Kind, int] = {
            each: count for each, count in running.items() if count and each != "communication"
        }
        total = sum(computing.values())
        for each, count in computing.items():
            spent[each] += length * count / total
        if running["communication"] and computing:
            hidden += length
        elif running["communication"]:
            spent["communication"] += length
        elif not computing:
            idle += length
        running[kind] += change
    return TimeShares(last - first, spent, hidden, idle + last - now)


def innermost(spans: Iterable[Span]) -> list[_Segment]:
    """Segments of each lane in which one innermost span runs.

    A span of kind `other` within another one is part of that one's work: a copy inside a matmul is the matmul's.
    """
    lanes: dict[object, list[Span]] = defaultdict(list)
    for span in spans:
        lanes[span.lane].append(span)
    return [segment for lane in lanes.values() for segment in _flat(lane)]


def _flat(lane: Sequence[Span]) -> list[_Segment]:
    """Spans of a lane without nesting: the innermost span at each instant."""
    segments: list[_Segment] = []
    open_spans: list[tuple[float, Kind, bool]] = []  # end, kind, runs
    now = 0.0

    def until(when: float) -> None:
        """Give the time up to `when` to what is open, innermost first."""
        nonlocal now
        while open_spans and open_spans[-1][0] <= when:
            end, kind, runs = open_spans.pop()
            if runs and end > now:
                segments.append(_Segment(now, end, kind))
            now = max(now, end)
        if open_spans and open_spans[-1][2] and when > now:
            segments.append(_Segment(now, when, open_spans[-1][1]))
        now = max(now, when)

    for span in sorted(lane, key=lambda each: (each.begin, -each.end)):
        until(span.begin)
        outer = open_spans[-1] if open_spans else None
        kind: Kind = outer[1] if outer is not None and outer[1] != "other" else span.kind
        # Clocks round: what claims to outlast that within which it began ends with it.
        open_spans.append((span.end if outer is None else min(span.end, outer[0]), kind, span.runs))
    until(max((span.end for span in lane), default=0.0))
    return segments
