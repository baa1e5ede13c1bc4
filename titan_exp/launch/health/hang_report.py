"""Hang report: a flag by the rank that noticed, stack and progress of every rank, and the diagnosis.

All are in the folder of the attempt's logs. Ranks need nothing but that folder to tell each other.
"""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_exp.launch.health.stack_dump import RankStack, to_json
from titan_exp.tracking.run_folder.atomic_write import write_atomically

REPORT_TIMEOUT = 15.0
"""Seconds for all ranks to write their stack records after the first noticed."""


@dataclass(frozen=True)
class HangDiagnosis:
    """Diagnosis of a hang."""

    headline: str
    """One line: at which step, and which ranks it is about."""
    text: str
    """The headline, and a line for each code position with the ranks at it."""


class HangFiles:
    """The files of one attempt.

    Args:
        logs: folder of the attempt's logs.
        world_size: ranks in all.
    """

    def __init__(self, logs: Path, world_size: int) -> None:
        self.logs, self.world_size = logs, world_size
        self.flag = logs / "hang"
        """Created by the rank that noticed first."""
        self.report = logs / "hang.txt"
        """Report for the user."""

    def stacks(self, rank: int) -> Path:
        """Python stacks of all threads of a rank; empty until they are written."""
        return self.logs / f"stacks-rank-{rank:05d}.txt"

    def recorder(self, rank: int) -> Path:
        """A rank's last collectives, as torch's flight recorder has them."""
        return self.logs / f"collectives-rank-{rank:05d}.json"

    def rank_stack(self, rank: int) -> Path:
        """File of a rank's own stack record."""
        return self.logs / f"stack-rank-{rank:05d}.json"

    def declare(self) -> bool:
        """Declare the hang; returns True if this process is the first."""
        try:
            os.close(os.open(self.flag, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except FileExistsError:
            return False
        return True

    def is_declared(self) -> bool:
        """True if a rank has declared the hang."""
        return self.flag.exists()

    def write_rank_stack(self, each: RankStack) -> None:
        """Write a rank's stack record."""
        write_atomically(self.rank_stack(each.rank), to_json(each), durable=False)

    def rank_stacks(self) -> dict[int, RankStack]:
        """Stack records written so far, by rank."""
        found = {}
        for rank in range(self.world_size):
            with contextlib.suppress(OSError, ValueError, TypeError):
                found[rank] = RankStack(**json.loads(self.rank_stack(rank).read_text(encoding="utf-8")))
        return found

    def native_ranks(self) -> list[int]:
        """Ranks stuck in native code: only the C timer could write their stacks."""
        return [
            rank
            for rank in range(self.world_size)
            if not self.rank_stack(rank).exists() and _size(self.stacks(rank)) > 0
        ]

    def all_reported(self) -> bool:
        """True if every rank has written its stack record."""
        return all(self.rank_stack(rank).exists() for rank in range(self.world_size))

    def report_pending(self) -> bool:
        """True if a hang is declared and its report is not written yet."""
        return self.is_declared() and not self.report.exists()

    def remove_empty(self) -> None:
        """Remove the files kept open for stacks that ranks left behind which were killed."""
        for rank in range(self.world_size):
            with contextlib.suppress(OSError):
                if not _size(self.stacks(rank)):
                    self.stacks(rank).unlink(missing_ok=True)

    def report_hang(self) -> HangDiagnosis | None:
        """Diagnosis by the files, written into the report unless it exists; None if no rank hung."""
        with contextlib.suppress(OSError):
            text = self.report.read_text(encoding="utf-8")
            return HangDiagnosis(text.partition("\n")[0], text)
        native, rank_stacks = self.native_ranks(), self.rank_stacks()
        if not native and not rank_stacks:
            return None
        hang = diagnose_hang(rank_stacks.values(), native=native, world_size=self.world_size, logs=self.logs)
        with contextlib.suppress(OSError):
            write_atomically(self.report, hang.text, durable=False)
        return hang


def diagnose_hang(known: Iterable[RankStack], *, native: Sequence[int], world_size: int, logs: Path) -> HangDiagnosis:
    """Find the ranks that block the others.

    Args:
        known: progress of the ranks that answered.
        stuck: ranks that could write no more than their stacks.
        world_size: ranks in all.
        logs: where the stacks are.
    """
    rank_stacks = sorted(known, key=lambda each: each.rank)
    silent = sorted(set(range(world_size)) - {each.rank for each in rank_stacks} - set(native))
    step = f"hung at step {min(each.step for each in rank_stacks)}" if rank_stacks else "hung"
    blocking, why = _blocking_ranks(rank_stacks, native, silent)
    first = next((each for each in rank_stacks if each.rank in blocking), rank_stacks[0] if rank_stacks else None)
    phase = f" in {first.phase}" if first is not None else ""
    headline = f"{step}{phase}: {why}"
    lines = [headline, ""]
    for each, ranks in _group_by_place(rank_stacks):
        where = f"in {each.collective}, called at " if each.collective else "at "
        lines.append(
            f"{format_ranks(ranks)}: step {each.step}, {each.phase}, {where}{each.place}, for {each.seconds:.0f} s"
        )
    if native:
        lines.append(
            f"{format_ranks(native)}: in native code that does not let Python go on; its stacks say where it was called"
        )
    if silent:
        lines.append(f"{format_ranks(silent)}: no answer: stopped, dead, or its machine is gone")
    lines += ["", f"Stacks of every thread and the last collectives: {logs}/stacks-rank-*.txt, collectives-rank-*.json"]
    return HangDiagnosis(headline, "\n".join(lines) + "\n")


def format_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-6, 9`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][-1] == rank - 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    text = ", ".join("-".join(str(end) for end in span) for span in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _blocking_ranks(
    rank_stacks: Sequence[RankStack], native: Sequence[int], silent: Sequence[int]
) -> tuple[list[int], str]:
    """Ranks that the others wait for, and the evidence."""
    if silent:
        return list(silent), f"{format_ranks(silent)} did not answer"
    if native:
        return list(native), f"{format_ranks(native)} stood in native code that does not let Python go on"
    outside = [each for each in rank_stacks if each.collective is None]
    if outside and (len(outside) < len(rank_stacks) or len(rank_stacks) == 1):
        ranks = [each.rank for each in outside]
        others = " while the others wait in a collective" if len(outside) < len(rank_stacks) else ""
        verb = "stands" if len(ranks) == 1 else "stand"
        return ranks, f"{format_ranks(ranks)} {verb} at {outside[0].place}{others}"
    if outside:
        return [], f"no rank is in a collective; {format_ranks([rank_stacks[0].rank])} at {rank_stacks[0].place}"
    return _blocking_in_collectives(rank_stacks)


def _blocking_in_collectives(rank_stacks: Sequence[RankStack]) -> tuple[list[int], str]:
    """The same if every rank waits in a collective."""
    behind = _lagging_ranks(rank_stacks)
    if behind:
        one = next(each for each in rank_stacks if each.rank in behind)
        instead = f"in {one.collective}, called at {one.place}"
        return behind, f"{format_ranks(behind)} did not enter a collective that the others wait in, but waits {instead}"
    places = Counter(each.place for each in rank_stacks)
    if len(places) == 1:
        return [], f"all ranks wait in the same collective, at {rank_stacks[0].place}: suspect the network"
    odd = [each for each in rank_stacks if each.place == min(places, key=lambda place: places[place])]
    ranks = [each.rank for each in odd]
    return ranks, f"the ranks wait in different collectives; {format_ranks(ranks)} at {odd[0].place}"


def _lagging_ranks(rank_stacks: Sequence[RankStack]) -> list[int]:
    """Ranks that have issued fewer collectives in a group than another rank of it has."""
    behind = set()
    for group in {group for each in rank_stacks for group in each.issued}:
        issued = {each.rank: each.issued[group] for each in rank_stacks if group in each.issued}
        behind |= {rank for rank, number in issued.items() if number < max(issued.values())}
    return sorted(behind)


def _group_by_place(rank_stacks: Sequence[RankStack]) -> list[tuple[RankStack, list[int]]]:
    """Ranks grouped by code position, the smallest group first."""
    groups: dict[tuple[int, str, str, str | None], list[RankStack]] = {}
    for each in rank_stacks:
        groups.setdefault((each.step, each.phase, each.place, each.collective), []).append(each)
    ordered = sorted(groups.values(), key=lambda group: (len(group), group[0].rank))
    return [(group[0], [each.rank for each in group]) for group in ordered]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
