"""A run that hangs, in files: a flag by the rank that noticed, stacks and standing of every rank, and what they say.

All are in the folder of the attempt's logs. Ranks need nothing but that folder to tell each other.
"""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_exp.launch.health.stack_dump import Standing, as_json
from titan_exp.tracking.run_folder.atomic_write import write_atomically

ANSWER = 15.0
"""Seconds that ranks have, after the first has noticed, for saying where they stand."""


@dataclass(frozen=True)
class Hang:
    """What is known of a hang."""

    headline: str
    """One line: at which step, and which ranks it is about."""
    text: str
    """That, and a line for every place where ranks stand."""


class HangFiles:
    """The files of one attempt.

    Args:
        logs: folder of the attempt's logs.
        world_size: ranks in all.
    """

    def __init__(self, logs: Path, world_size: int) -> None:
        self.logs, self.world_size = logs, world_size
        self.flag = logs / "hang"
        """There from when the first rank noticed."""
        self.report = logs / "hang.txt"
        """What a person reads."""

    def stacks(self, rank: int) -> Path:
        """Python stacks of all threads of a rank; empty until they are written."""
        return self.logs / f"stacks-rank-{rank:05d}.txt"

    def recorder(self, rank: int) -> Path:
        """A rank's last collectives, as torch's flight recorder has them."""
        return self.logs / f"collectives-rank-{rank:05d}.json"

    def standing(self, rank: int) -> Path:
        """Where a rank stands, by itself."""
        return self.logs / f"standing-rank-{rank:05d}.json"

    def declare(self) -> bool:
        """Say that the run hangs; returns whether this process was the first to."""
        try:
            os.close(os.open(self.flag, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except FileExistsError:
            return False
        return True

    def declared(self) -> bool:
        """Whether any rank has said so."""
        return self.flag.exists()

    def write_standing(self, each: Standing) -> None:
        """Write a rank's standing down."""
        write_atomically(self.standing(each.rank), as_json(each), durable=False)

    def standings(self) -> dict[int, Standing]:
        """The standings that are there so far, by rank."""
        found = {}
        for rank in range(self.world_size):
            with contextlib.suppress(OSError, ValueError, TypeError):
                found[rank] = Standing(**json.loads(self.standing(rank).read_text(encoding="utf-8")))
        return found

    def stuck_ranks(self) -> list[int]:
        """Ranks whose stacks were written by the last resort, because they could not stand up and say anything."""
        return [
            rank for rank in range(self.world_size) if not self.standing(rank).exists() and _size(self.stacks(rank)) > 0
        ]

    def all_stand(self) -> bool:
        """Whether every rank has said where it stands."""
        return all(self.standing(rank).exists() for rank in range(self.world_size))

    def awaited(self) -> bool:
        """Whether the report of a hang is still to come."""
        return self.declared() and not self.report.exists()

    def remove_empty(self) -> None:
        """Remove the files kept open for stacks that ranks left behind which were killed."""
        for rank in range(self.world_size):
            with contextlib.suppress(OSError):
                if not _size(self.stacks(rank)):
                    self.stacks(rank).unlink(missing_ok=True)

    def conclude(self) -> Hang | None:
        """What the files say, which is written into the report unless that is there; None where no rank hung."""
        with contextlib.suppress(OSError):
            text = self.report.read_text(encoding="utf-8")
            return Hang(text.partition("\n")[0], text)
        stuck, standings = self.stuck_ranks(), self.standings()
        if not stuck and not standings:
            return None
        hang = conclusion(standings.values(), stuck=stuck, world_size=self.world_size, logs=self.logs)
        with contextlib.suppress(OSError):
            write_atomically(self.report, hang.text, durable=False)
        return hang


def conclusion(known: Iterable[Standing], *, stuck: Sequence[int], world_size: int, logs: Path) -> Hang:
    """Who holds up whom.

    Args:
        known: standings of the ranks that answered.
        stuck: ranks that could write no more than their stacks.
        world_size: ranks in all.
        logs: where the stacks are.
    """
    standings = sorted(known, key=lambda each: each.rank)
    silent = sorted(set(range(world_size)) - {each.rank for each in standings} - set(stuck))
    step = f"hung at step {min(each.step for each in standings)}" if standings else "hung"
    culprits, why = _culprits(standings, stuck, silent)
    first = next((each for each in standings if each.rank in culprits), standings[0] if standings else None)
    phase = f" in {first.phase}" if first is not None else ""
    headline = f"{step}{phase}: {why}"
    lines = [headline, ""]
    for each, ranks in _by_place(standings):
        where = f"in {each.collective}, called at " if each.collective else "at "
        lines.append(f"{named(ranks)}: step {each.step}, {each.phase}, {where}{each.place}, for {each.seconds:.0f} s")
    if stuck:
        lines.append(
            f"{named(stuck)}: in native code that does not let Python go on; its stacks say where it was called"
        )
    if silent:
        lines.append(f"{named(silent)}: no answer: stopped, dead, or its machine is gone")
    lines += ["", f"Stacks of every thread and the last collectives: {logs}/stacks-rank-*.txt, collectives-rank-*.json"]
    return Hang(headline, "\n".join(lines) + "\n")


def named(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-6, 9`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][-1] == rank - 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    text = ", ".join("-".join(str(end) for end in span) for span in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _culprits(standings: Sequence[Standing], stuck: Sequence[int], silent: Sequence[int]) -> tuple[list[int], str]:
    """The ranks that the others wait for, and how that is known."""
    if silent:
        return list(silent), f"{named(silent)} did not answer"
    if stuck:
        return list(stuck), f"{named(stuck)} stood in native code that does not let Python go on"
    outside = [each for each in standings if each.collective is None]
    if outside and (len(outside) < len(standings) or len(standings) == 1):
        ranks = [each.rank for each in outside]
        others = " while the others wait in a collective" if len(outside) < len(standings) else ""
        verb = "stands" if len(ranks) == 1 else "stand"
        return ranks, f"{named(ranks)} {verb} at {outside[0].place}{others}"
    if outside:
        return [], f"no rank is in a collective; {named([standings[0].rank])} at {standings[0].place}"
    return _culprits_inside(standings)


def _culprits_inside(standings: Sequence[Standing]) -> tuple[list[int], str]:
    """The same where every rank waits in a collective."""
    behind = _behind(standings)
    if behind:
        one = next(each for each in standings if each.rank in behind)
        instead = f"in {one.collective}, called at {one.place}"
        return behind, f"{named(behind)} did not enter a collective that the others wait in, but waits {instead}"
    places = Counter(each.place for each in standings)
    if len(places) == 1:
        return [], f"all ranks wait in the same collective, at {standings[0].place}: suspect the network"
    odd = [each for each in standings if each.place == min(places, key=lambda place: places[place])]
    ranks = [each.rank for each in odd]
    return ranks, f"the ranks wait in different collectives; {named(ranks)} at {odd[0].place}"


def _behind(standings: Sequence[Standing]) -> list[int]:
    """Ranks that have issued fewer collectives in a group than another rank of it has."""
    behind = set()
    for group in {group for each in standings for group in each.issued}:
        issued = {each.rank: each.issued[group] for each in standings if group in each.issued}
        behind |= {rank for rank, number in issued.items() if number < max(issued.values())}
    return sorted(behind)


def _by_place(standings: Sequence[Standing]) -> list[tuple[Standing, list[int]]]:
    """Ranks that stand at the same place together, the smallest company first."""
    groups: dict[tuple[int, str, str, str | None], list[Standing]] = {}
    for each in standings:
        groups.setdefault((each.step, each.phase, each.place, each.collective), []).append(each)
    ordered = sorted(groups.values(), key=lambda group: (len(group), group[0].rank))
    return [(group[0], [each.rank for each in group]) for group in ordered]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
