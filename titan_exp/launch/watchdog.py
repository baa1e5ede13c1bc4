"""Watchdog of a rank, and its report of a hang."""

import contextlib
import faulthandler
import json
import os
import socket
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from titan_exp.config.groups.run import ClusterConfig
from titan_exp.tracking.logging import STEP, ProgressSnapshot, ProgressTracker, get_logger
from titan_exp.tracking.run_folder.files import wait_until, write_atomically

RECORDER_SIZE = "TORCH_FR_BUFFER_SIZE"
"""torch environment variable: number of flight recorder entries, read when the process group is created."""
COLLECTIVES = "torch/distributed/distributed_c10d.py"
PACKAGES = frozenset({"site-packages", "dist-packages"})
"""Folders of installed packages, in this environment and in others."""
WAITING = frozenset({"wait", "wait_tensor", "synchronize", "item"})
"""torch functions that block on other ranks or on the device."""


@dataclass(frozen=True)
class RankStack:
    """Position of one rank at a hang."""

    rank: int
    host: str
    pid: int
    step: int  # current step; the last finished one during evaluation or saving
    phase: str
    seconds: float
    place: str
    """`file:line in function` of the innermost main-thread frame outside site-packages and the standard library."""
    collective: str | None  # collective that blocks the main thread; None outside a collective
    issued: dict[str, int] = field(default_factory=dict)
    """Collectives issued so far per process group, from the flight recorder."""


def rank_stack(position: ProgressSnapshot, rank: int, recorder: dict[str, Any] | None) -> RankStack:
    """Stack record of this process; `recorder` is the result of `read_flight_recorder`."""
    frame, frames = sys._current_frames().get(threading.main_thread().ident or 0), list[FrameType]()
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    own = next((frame for frame in frames if _is_own_code(frame.f_code)), frames[0] if frames else None)
    place, called = "unknown", frames
    if own is not None:
        file = own.f_code.co_filename
        file = file[file.rindex("titan_exp/") :] if "titan_exp/" in file else file
        place = f"{file}:{own.f_lineno} in {own.f_code.co_name}"
        # Only frames called from there count: an outer one may be a collective that called back into our code.
        called = frames[: frames.index(own)]
    at = (position.at, position.phase, position.seconds, place, _collective(called))
    return RankStack(rank, socket.gethostname(), os.getpid(), *at, _issued(recorder))


def read_flight_recorder() -> dict[str, Any] | None:
    """Torch's flight recorder of this process; None without torch or without entries."""
    if "torch.distributed" not in sys.modules:
        return None
    from torch._C import _distributed_c10d as c10d

    # NCCL's recorder tracks execution on the device, but needs a build with NCCL; the other covers any backend.
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        try:
            found = json.loads(getattr(c10d, name)())
        except Exception:  # a diagnosis must not raise
            continue
        if found.get("entries"):
            return found
    return None


def _is_own_code(code: CodeType) -> bool:
    path = code.co_filename
    folders = set(path.split("/"))
    if path.startswith("<") or "titan_exp" in folders:
        return not path.startswith("<")
    # By name: a container's torch lies outside the environment that runs titan_exp.
    if folders & PACKAGES:
        return False
    library = sysconfig.get_paths()
    return not any(path.startswith(library[name]) for name in ("stdlib", "platstdlib"))


def _collective(frames: list[FrameType]) -> str | None:
    """Outermost torch collective; `frames` are ordered innermost first."""
    for frame in reversed(frames):
        if frame.f_code.co_filename.endswith(COLLECTIVES) and not frame.f_code.co_name.startswith("_"):
            return frame.f_code.co_name
    waits = [frame.f_code.co_name for frame in frames if "/torch/" in frame.f_code.co_filename]
    return next((name for name in waits if name in WAITING), None)


def _issued(recorder: dict[str, Any] | None) -> dict[str, int]:
    last: dict[str, int] = {}
    for entry in (recorder or {}).get("entries", []):
        if not entry.get("is_p2p"):
            group = str(entry["process_group"][0])
            last[group] = max(last.get(group, 0), int(entry["collective_seq_id"]))
    return last


REPORT_TIMEOUT = 15.0  # seconds to wait for the stack records of all ranks after a hang is declared


@dataclass(frozen=True)
class HangDiagnosis:
    """Headline and text of a hang report."""

    headline: str  # one line: step, phase, blocking ranks and evidence
    text: str  # headline, then one line per code position with its ranks


class HangFiles:
    """Hang files in the log folder of one attempt."""

    def __init__(self, logs: Path, world_size: int) -> None:
        self.logs, self.world_size = logs, world_size
        self.flag = logs / "hang"  # created by the first rank that detects the hang
        self.report = logs / "hang.txt"

    def stacks(self, rank: int) -> Path:
        """Path of a rank's Python stacks (all threads); empty until the hang."""
        return self.logs / f"stacks-rank-{rank:05d}.txt"

    def recorder(self, rank: int) -> Path:
        """Path of a rank's flight recorder dump."""
        return self.logs / f"collectives-rank-{rank:05d}.json"

    def rank_stack(self, rank: int) -> Path:
        """Path of a rank's stack record."""
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

    def write_rank_stack(self, record: RankStack) -> None:
        """Write a rank's stack record."""
        write_atomically(self.rank_stack(record.rank), json.dumps(asdict(record), indent=2) + "\n", durable=False)

    def rank_stacks(self) -> dict[int, RankStack]:
        """Read the stack records written so far, by rank."""
        found = {}
        for rank in range(self.world_size):
            with contextlib.suppress(OSError, ValueError, TypeError):
                found[rank] = RankStack(**json.loads(self.rank_stack(rank).read_text(encoding="utf-8")))
        return found

    def native_ranks(self) -> list[int]:
        """Ranks stuck in native code: only faulthandler's C timer wrote their stacks."""
        missing = [rank for rank in range(self.world_size) if not self.rank_stack(rank).exists()]
        return [rank for rank in missing if _size(self.stacks(rank)) > 0]

    def all_reported(self) -> bool:
        """True if every rank has written its stack record."""
        return all(self.rank_stack(rank).exists() for rank in range(self.world_size))

    def report_pending(self) -> bool:
        """True if a hang is declared and its report is not yet written."""
        return self.is_declared() and not self.report.exists()

    def remove_empty(self) -> None:
        """Remove the empty stack files of killed ranks."""
        for rank in range(self.world_size):
            with contextlib.suppress(OSError):
                if not _size(self.stacks(rank)):
                    self.stacks(rank).unlink(missing_ok=True)

    def report_hang(self) -> HangDiagnosis | None:
        """Read the hang report, or diagnose the hang and write it; None without a hang."""
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
    """Find the ranks that block the others, by stack records of responsive ranks, and the `native` ranks, which are
    stuck in native code. The text names the log folder."""
    rank_stacks = sorted(known, key=lambda stack: stack.rank)
    silent = sorted(set(range(world_size)) - {stack.rank for stack in rank_stacks} - set(native))
    step = f"hung at step {min(stack.step for stack in rank_stacks)}" if rank_stacks else "hung"
    blocking, why = _blocking_ranks(rank_stacks, native, silent)
    first = next((stack for stack in rank_stacks if stack.rank in blocking), rank_stacks[0] if rank_stacks else None)
    headline = f"{step}{f' in {first.phase}' if first is not None else ''}: {why}"
    lines, groups = [headline, ""], dict[tuple[int, str, str, str | None], list[RankStack]]()
    for stack in rank_stacks:
        groups.setdefault((stack.step, stack.phase, stack.place, stack.collective), []).append(stack)
    for group in sorted(groups.values(), key=lambda group: (len(group), group[0].rank)):
        stack, ranks = group[0], [stack.rank for stack in group]
        where = f"in {stack.collective}, called at " if stack.collective else "at "
        lines.append(
            f"{format_ranks(ranks)}: step {stack.step}, {stack.phase}, {where}{stack.place}, for {stack.seconds:.0f} s"
        )
    if native:
        lines.append(f"{format_ranks(native)}: in native code that blocks Python (the stacks show the call)")
    if silent:
        lines.append(f"{format_ranks(silent)}: no answer, so it has stopped or died, or its machine is down")
    lines += ["", f"Stacks of every thread and the last collectives: {logs}/stacks-rank-*.txt, collectives-rank-*.json"]
    return HangDiagnosis(headline, "\n".join(lines) + "\n")


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks: `rank 3`, `ranks 0-6, 9`."""
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
    if away := list(silent or native):
        what = "did not answer" if silent else f"{_verb(native)} stuck in native code that blocks Python"
        return away, f"{format_ranks(away)} {what}"
    outside = [stack for stack in rank_stacks if stack.collective is None]
    if outside and (len(outside) < len(rank_stacks) or len(rank_stacks) == 1):
        ranks = [stack.rank for stack in outside]
        others = " while the others wait in a collective" if len(outside) < len(rank_stacks) else ""
        return ranks, f"{format_ranks(ranks)} {_verb(ranks)} at {outside[0].place}{others}"
    if outside:
        return [], f"no rank is in a collective, and {format_ranks([rank_stacks[0].rank])} is at {rank_stacks[0].place}"
    behind = set[int]()  # issued fewer collectives in a process group than another rank of it
    for group in {group for stack in rank_stacks for group in stack.issued}:
        issued = {stack.rank: stack.issued[group] for stack in rank_stacks if group in stack.issued}
        behind |= {rank for rank, number in issued.items() if number < max(issued.values())}
    if behind:
        first, who = next(stack for stack in rank_stacks if stack.rank in behind), format_ranks(sorted(behind))
        instead = f"in {first.collective}, called at {first.place}"
        return sorted(behind), f"{who} did not enter a collective that the others wait in, but waits {instead}"
    places = Counter(stack.place for stack in rank_stacks)
    if len(places) == 1:
        return [], f"all ranks wait in the same collective, at {rank_stacks[0].place}: so suspect the network"
    odd = [stack for stack in rank_stacks if stack.place == min(places, key=lambda place: places[place])]
    ranks = [stack.rank for stack in odd]
    return ranks, f"the ranks wait in different collectives, {format_ranks(ranks)} at {odd[0].place}"


def _verb(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


POLL_INTERVAL = 1.0
OTHER_PHASE_FACTOR = 3.0  # limit multiplier for phases other than a regular step
MEDIAN_FACTOR = 10.0  # minimum limit of a regular step, in multiples of the median step time
WARN_MEDIAN_FACTOR = 3.0
"""Median step times below which a regular step gets no warning; below the limit, so that slow steps warn first."""
NATIVE_GRACE = 5.0  # seconds past the limit before the C timer kills a rank that runs no Python
RECORDER_ENTRIES = "2000"


class Watchdog(threading.Thread):
    """Watchdog thread, running until `stop`. `give_up(reason)` exits the process, and so may `on_poll`."""

    def __init__(
        self,
        config: ClusterConfig,
        files: HangFiles,
        *,
        rank: int,
        progress: ProgressTracker,
        give_up: Callable[[str], None],
        on_poll: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name="titan_exp watchdog", daemon=True)
        minutes = (config.hang_warn_minutes, config.hang_kill_minutes)
        self._warn, self._kill = (None if limit is None else 60.0 * limit for limit in minutes)
        self._files, self._rank, self._progress = files, rank, progress
        self._give_up, self._on_poll = give_up, on_poll
        limits = [limit for limit in (self._warn, self._kill) if limit is not None]
        self._poll_interval = min([POLL_INTERVAL, *(limit / 10 for limit in limits)])
        self._warned = self._hanging = False
        self._stopped = threading.Event()
        if self._kill is not None:
            os.environ.setdefault(RECORDER_SIZE, RECORDER_ENTRIES)
            files.logs.mkdir(exist_ok=True)
            # Kept open for faulthandler's C timer.
            self._stacks = files.stacks(rank).open("w", encoding="utf-8")

    def stop(self) -> None:
        """Stop the thread and remove an empty stack file.

        Blocks while this rank exits as hung: errors caused by peers that have already exited are not the cause.
        """
        self._stopped.set()
        while self._hanging:
            time.sleep(POLL_INTERVAL)
        if self._kill is not None:
            faulthandler.cancel_dump_traceback_later()
            with contextlib.suppress(OSError):
                if self._stacks.tell() == 0 and not self._files.is_declared():
                    self._files.stacks(self._rank).unlink(missing_ok=True)

    def run(self) -> None:
        """Poll until stopped."""
        while not self._stopped.is_set():
            self._on_poll()
            position = self._progress.snapshot()
            # This comes before the end, even if this thread polls late.
            self._warn_if_late(position)
            if self._kill is not None:
                left = limit(self._kill, position) - position.seconds
                # Another rank may have declared a hang, which counts without recent progress.
                if left <= 0 or (position.seconds > self._kill / 4 and self._files.is_declared()):
                    self._hung()
                    return
                # Until then, the first rank to detect the hang is still waiting for the others' records.
                last = left + min(NATIVE_GRACE, self._kill / 2)
                faulthandler.dump_traceback_later(last, exit=True, file=self._stacks)
            self._stopped.wait(self._poll_interval)

    def _warn_if_late(self, position: ProgressSnapshot) -> None:
        late = self._warn is not None and position.seconds > limit(self._warn, position, WARN_MEDIAN_FACTOR)
        if late and not self._warned:
            consequence = ""
            if self._kill is not None:
                end = f"{limit(self._kill, position):.0f} s we end the run as hung (cluster.hang_kill_minutes)"
                consequence = f". After {end}"
            get_logger().warning(
                "rank %d: no progress for %.0f s in %s after step %d%s",
                self._rank, position.seconds, position.phase, position.step, consequence,
            )  # fmt: skip
        self._warned = late

    def _hung(self) -> None:
        self._hanging = True
        # Kills the process if the code below hangs too.
        faulthandler.dump_traceback_later(2 * REPORT_TIMEOUT, exit=True, file=self._stacks)
        position, files, first = self._progress.snapshot(), self._files, False
        with contextlib.suppress(OSError):
            first = files.declare()
        faulthandler.dump_traceback(self._stacks, all_threads=True)
        recorder = read_flight_recorder()
        with contextlib.suppress(OSError):
            if recorder is not None:
                files.recorder(self._rank).write_text(json.dumps(recorder, indent=1), encoding="utf-8")
            files.write_rank_stack(rank_stack(position, self._rank, recorder))
        # The first rank writes the report once the others have reported.
        most = min(REPORT_TIMEOUT, self._kill or REPORT_TIMEOUT) * (1.0 if first else 1.5)
        wait_until(files.all_reported if first else files.report.exists, most)
        hang = files.report_hang() if first or files.report.exists() else None
        self._give_up(f"hung at step {position.at} in {position.phase}" if hang is None else hang.headline)


def limit(seconds: float, position: ProgressSnapshot, median_factor: float = MEDIAN_FACTOR) -> float:
    """Seconds without progress before action, by phase; `seconds` is the configured limit of a regular step."""
    if position.phase == STEP:
        return max(seconds, median_factor * position.median_step_seconds)
    return OTHER_PHASE_FACTOR * seconds
