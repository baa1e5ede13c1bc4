"""Results of the comparison: one flushed JSON line per process, and a Markdown table rewritten after each row."""

import json
import os
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.versus.cases import MEMORY_GOAL, PEER, case_of

SIDES = ("peer", "ours")
"""Both sides of a row, in the order of its first round."""
LEGEND = (
    "Median of the timed steps, then over processes; memory is the largest peak of the timed steps; losses are those "
    f"of the first steps from the same weights. Goal for reserved memory: at most {MEMORY_GOAL} of torchtitan's."
)
"""Line below every table."""


def sides_of(row: str) -> tuple[str, ...]:
    """Sides of a row; an option of ours has no side of torchtitan's."""
    return SIDES[1:] if "+" in row else SIDES


class Results:
    """Results in a folder: `rows.jsonl` and `table.md`."""

    def __init__(self, folder: Path, head: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._head = folder, head
        self._found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        self._rows: list[str] = []
        self._notes: list[str] = []

    @property
    def failed(self) -> bool:
        """True if a process failed."""
        return any("error" in result for results in self._found.values() for result in results)

    def add(self, row: str, side: str, result: dict[str, Any]) -> None:
        """Append the result of one process, or its `error`."""
        if row not in self._rows:
            self._rows.append(row)
        self._found[row, side].append(result)
        with (self.folder / "rows.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"row": row, "side": side, **result}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._write()

    def note(self, text: str) -> None:
        """Add a line below the table."""
        self._notes.append(text)
        self._write()

    def good(self, row: str, side: str) -> list[dict[str, Any]]:
        """Results of the processes that did not fail."""
        return [result for result in self._found[row, side] if "error" not in result]

    def table(self) -> str:
        """Markdown table of all rows so far."""
        them = f"torchtitan {PEER}"
        head = ["case", f"{them} tokens/s", "ours", "ratio", "goal", f"{them} GiB reserved", "ours", "ratio"]
        head += ["allocated, both", "largest loss difference", "processes"]
        lines = [f"| {' | '.join(head)} |", "|---" + "|--:" * (len(head) - 1) + "|"]
        lines += [f"| {' | '.join(self._cells(row))} |" for row in self._rows]
        return "\n".join([self._head, "", *lines, "", LEGEND, *self._notes]) + "\n"

    def _cells(self, row: str) -> list[str]:
        case, base = case_of(row), row.partition("+")[0]
        us, them = self.good(row, "ours"), self.good(base, "peer")
        failures = [result["error"] for side in SIDES for result in self._found[row, side] if "error" in result]
        my_speed, my_memory = _median(us, "tokens_per_second"), _largest(us, "reserved")
        speed, memory = _median(them, "tokens_per_second"), _largest(them, "reserved")
        apart = "–"
        if us and them:
            pairs = zip(us[0]["losses"], them[0]["losses"], strict=True)
            apart = f"{max(abs(mine - theirs) for mine, theirs in pairs):.1e}"
        return [
            case.title,
            _number(speed, ",.0f"),
            _number(my_speed, ",.0f"),
            _ratio(my_speed, speed),
            _number(case.goal, "≥ .2f"),
            _number(memory, ".1f"),
            _number(my_memory, ".1f"),
            _ratio(my_memory, memory),
            f"{_number(_largest(them, 'allocated'), '.1f')} / {_number(_largest(us, 'allocated'), '.1f')}",
            apart,
            f"{len(them)} + {len(us)}" + "".join(f"; failed: {error.replace('|', '/')}" for error in failures),
        ]

    def _write(self) -> None:
        partial = self.folder / "table.md.partial"
        partial.write_text(self.table(), encoding="utf-8")
        partial.replace(self.folder / "table.md")


def _median(results: list[dict[str, Any]], key: str) -> float | None:
    return statistics.median(result[key] for result in results) if results else None


def _largest(results: list[dict[str, Any]], key: str) -> float | None:
    return max((result[key] for result in results if result[key] is not None), default=None)


def _number(value: float | None, form: str) -> str:
    if value is None:
        return "–"
    return f"≥ {value:{form[2:]}}" if form.startswith("≥") else f"{value:{form}}"


def _ratio(ours: float | None, theirs: float | None) -> str:
    return "–" if not ours or not theirs else f"{ours / theirs:.3f}"
