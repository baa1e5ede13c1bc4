"""Time shares of overlapping spans, with hidden and exposed communication apart; arithmetic in any unit of time."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from titan_exp.trainer.profiling.kernel_categories import KINDS, Kind


@dataclass(frozen=True)
class Span:
    """A kernel, operator or annotation on a timeline."""

    name: str
    """Name in the profile."""
    kind: Kind
    """Category, by name."""
    begin: float
    """Start time."""
    end: float
    """End time."""
    lane: object
    """Thread or stream; spans of a lane are nested or disjoint."""
    runs: bool = True
    """True if the span is work; False for an annotation, which only gives its category to the spans inside it."""


@dataclass(frozen=True)
class TimeShares:
    """Time shares of a window; the five categories and `idle` add up to it."""

    window: float
    """Length of the window."""
    spent: dict[Kind, float]
    """Time by category. Communication counts only where exposed; lanes that compute at once share the time evenly."""
    hidden: float
    """Time of communication that overlapped with computation."""
    idle: float
    """Time in which nothing ran."""


@dataclass(frozen=True)
class _Segment:
    begin: float
    end: float
    kind: Kind


def time_shares(spans: Iterable[Span], window: tuple[float, float]) -> TimeShares:
    """Divide a window, given by its begin and end, among the spans in it; spans are clipped to the window."""
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
    """Segments of each lane by the category of the innermost span; `other` spans take the category around them."""
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
