"""Times of a rank: steps without waiting for others, the first compilation, and unexpected recompilations. Ranks wait
for each other in every step, so wall time is the same on all of them. We measure times that other ranks cannot
lengthen: data loading, processor time of the main thread (the computation on a CPU, kernel launches with a GPU), and a
small matmul on the device."""

import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.run_folder.folder_owner import own_folder
from titan_exp.tracking.run_folder.run_folder import RunFolder

PROBE_SIZE = {"cpu": 128, "cuda": 2048}  # rows and columns of the probe's matrices: well under a millisecond
PROBES = 4  # number of probe matmuls; the fastest counts on a CPU, the mean without the first on a GPU


@dataclass(frozen=True)
class OwnTimes:
    """Times of a rank since the previous row, in seconds per step."""

    step: float  # wall time of a step, without logging, evaluation, checkpoints and exports
    own: float  # data loading plus processor time of the main thread
    data: float  # data loading, a part of `own`
    probe: float  # seconds of the probe matmul; 0 before the first was timed


class StepTimes:
    """Clocks of this rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._reset()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Time the `with` block as data loading."""
        begin = time.perf_counter()
        yield
        self._data += time.perf_counter() - begin

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Time the processor in the `with` block, which also waits in collectives."""
        begin = time.thread_time()
        yield
        self._processor += time.thread_time() - begin

    def begin(self) -> None:
        """Begin a step."""
        self._begun = time.perf_counter()

    def end(self) -> None:
        """End a step."""
        self._steps += 1
        self._wall += time.perf_counter() - self._begun

    def take(self) -> OwnTimes:
        """Times since the last call; called just after the device was synchronized."""
        steps = max(self._steps, 1)
        data, processor = self._data / steps, self._processor / steps
        times = OwnTimes(self._wall / steps, data + processor, data, self._probe())
        self._reset()
        return times

    def _reset(self) -> None:
        self._steps = 0
        self._wall = self._data = self._processor = 0.0
        self._begun = time.perf_counter()

    @torch.no_grad()
    def _probe(self) -> float:
        """Seconds of the probe matmul; on a GPU those of the previous call, which needs no synchronization."""
        size = PROBE_SIZE[self._device.type]
        if self._device.type == "cpu":
            matrix, seconds = torch.ones(size, size), []
            for _ in range(PROBES):
                begin = time.perf_counter()
                torch.mm(matrix, matrix)
                seconds.append(time.perf_counter() - begin)
            return min(seconds)
        found = 0.0
        if self._events is not None:
            found = self._events[0].elapsed_time(self._events[1]) / 1e3 / (PROBES - 1)
        matrix = torch.ones(size, size, device=self._device, dtype=torch.bfloat16)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.mm(matrix, matrix)
        begin.record()
        for _ in range(PROBES - 1):
            torch.mm(matrix, matrix)
        end.record()
        self._events = begin, end
        return found


OWN_RATIO = 1.3  # ratio of a rank's own time to the median of its peers above which the rank counts as slow
PROBE_RATIO = {"cpu": 1.5, "cuda": 1.2}
"""The same ratio for the probe matmul, by device. On a CPU it is so short that other processes disturb it."""
MIN_SECONDS = 2e-3  # seconds per step by which the own time must also exceed the median; shorter delays do not matter
ROWS = 3  # consecutive rows in which a rank must be slow before it is reported


class Straggler(NamedTuple):
    """A rank that has been slow for `ROWS` rows, with the reason as logged."""

    rank: int
    reason: str


class Stragglers:
    """Straggler detection of one attempt, on rank 0. Own times are compared within a pipeline stage, whose `stage_size`
    ranks are consecutive and do the same work; the probe matmul is compared among all ranks."""

    def __init__(self, stage_size: int, device: str) -> None:
        self._stage_size, self._probe_ratio = stage_size, PROBE_RATIO[device]
        self._rows: dict[tuple[int, str], int] = {}

    def find(self, times: Sequence[OwnTimes]) -> list[Straggler]:
        """Check the times of all ranks in one row. A straggler is returned once, until it has recovered."""
        found = []
        for rank, own in enumerate(times):
            first = rank - rank % self._stage_size
            stage = enumerate(times[first : first + self._stage_size], first)
            peers = [peer.own for other, peer in stage if other != rank]
            median = statistics.median(peers) if peers else own.own
            if self._persists(rank, "own", own.own > max(OWN_RATIO * median, median + MIN_SECONDS)):
                reason = (
                    f"its own time is {own.own:.3f} s a step, {own.own / max(median, 1e-9):.1f} times that of the "
                    f"ranks that do the same work ({median:.3f} s), of which {own.data:.3f} s wait for data. Own time "
                    "is data loading and processor time of the main thread, without waiting for other ranks"
                )
                found.append(Straggler(rank, reason))
            probes = [other.probe for number, other in enumerate(times) if number != rank and other.probe > 0]
            median = statistics.median(probes) if probes else own.probe
            if self._persists(rank, "probe", own.probe > self._probe_ratio * median):
                reason = (
                    f"its device takes {own.probe / median:.1f} times as long as the others' for the same small matmul "
                    f"({1e3 * own.probe:.3f} ms): is it throttled, shared, or another model?"
                )
                found.append(Straggler(rank, reason))
        return found

    def _persists(self, rank: int, kind: str, slow: bool) -> bool:
        rows = self._rows.get((rank, kind), 0) + 1 if slow else 0
        self._rows[rank, kind] = rows
        return rows == ROWS


VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable for the cache of inductor, its Triton kernels and AOTAutograd."""


def set_compile_cache(folder: RunFolder, run_name: str) -> None:
    """Set the compile cache of this process, unless the user has set one. Call it before anything compiles. Entries are
    keyed by a hash of the graph, torch's version and its settings, so runs and ranks share them safely. torch unpickles
    and executes them, so users do not share them. torch never deletes them."""
    if VARIABLE not in os.environ:
        with suppress(UserError, OSError):  # another user's: torch's own default then
            # Not in `.cache`, whose owner could replace it.
            os.environ[VARIABLE] = str(own_folder(_runs_of(folder, run_name) / f".compile-{os.geteuid()}"))


def cache_of(folder: RunFolder, run_name: str) -> Path:
    """Compile cache that runs share: `.cache` under `paths.runs`, or in the run folder if it was moved elsewhere."""
    return _runs_of(folder, run_name) / ".cache"


def _runs_of(folder: RunFolder, run_name: str) -> Path:
    path = folder.path.resolve()
    return path.parents[1] if path.parent.name == run_name else path


TUNING_PHASES = ("_template_precompiling", "_template_autotuning")
"""Endings of inductor's names for compiling and timing candidate kernels of a matmul."""
MAX_WARNINGS = 3


class CompileReport:
    """Logs compilation in this process, from torch's counters. Compilation is expected in the first step and the first
    evaluation of an attempt. Later it means that shapes or settings changed."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._before = _Counters.read()
        self._read_at = time.time()
        self._begun: set[str] = set()
        self._compiled = 0
        self._warnings = 0

    def after(self, phase: str, step: int) -> None:
        """Log compilation since the last call, attributed to `phase` ("step" or "evaluation") of `step`."""
        compiled, first = 0, phase not in self._begun
        if "torch._dynamo.utils" in sys.modules:
            from torch._dynamo.utils import compilation_time_metrics

            compiled = sum(map(len, compilation_time_metrics.values()))
        if compiled == self._compiled and not first:
            return
        self._compiled, now = compiled, _Counters.read()
        seconds = now.seconds - self._before.seconds
        if seconds > 0 and first:
            self._log_first(phase, seconds, now)
        elif seconds > 0:
            self._warn(phase, step, seconds)
        self._begun.add(phase)
        self._before, self._read_at = now, time.time()

    def _log_first(self, phase: str, seconds: float, now: "_Counters") -> None:
        graphs, cached = now.graphs - self._before.graphs, now.cached - self._before.cached
        total = f" of {time.perf_counter() - self._since:.1f} s" if phase == "step" else ""
        # Backends without code generation have no cache.
        found = f", with {cached} of {graphs} graphs from {os.environ.get(VARIABLE)}" if graphs else ""
        if tuned := now.tuned - self._before.tuned:
            timed = now.tuning_seconds - self._before.tuning_seconds
            found += f", and the compiler timed {tuned} matmuls, in {timed:.1f} s of it"
        get_logger().info("first %s: compilation took %.1f s%s%s", phase, seconds, total, found)

    def _warn(self, phase: str, step: int, seconds: float) -> None:
        self._warnings += 1
        if self._warnings > MAX_WARNINGS:
            return
        text = (
            "recompiled in the %s at step %d, which took %.1f s: %s. To log every reason, set TORCH_LOGS=recompiles. "
        )
        text += "To train without compilation, use compile=none%s"
        last = ". We do not log further ones" if self._warnings == MAX_WARNINGS else ""
        get_logger().warning(text, phase, step, seconds, _reasons(self._read_at) or "torch gives no reason", last)


class _Counters(NamedTuple):
    """Compilation counters of this process at one moment."""

    seconds: float = 0.0
    graphs: int = 0
    cached: int = 0
    tuned: int = 0
    tuning_seconds: float = 0.0

    @staticmethod
    def read() -> "_Counters":
        # Importing the compiler takes seconds: if it is not imported, nothing was compiled.
        if "torch._dynamo.utils" not in sys.modules:
            return _Counters()
        from torch._dynamo.utils import calculate_time_spent, compilation_time_metrics, counters

        seconds = calculate_time_spent()["total_wall_time"]
        inductor = counters["inductor"]
        cached, compiled = inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"]
        graphs, tuned = cached + compiled + inductor["fxgraph_cache_bypass"], inductor["select_algorithm_autotune"]
        tuning = sum(sum(times) for name, times in compilation_time_metrics.items() if name.endswith(TUNING_PHASES))
        return _Counters(seconds, graphs, cached, tuned, tuning)


def _reasons(since: float) -> str:
    """Distinct reasons of guard failures since a time, without frame numbers."""
    from torch._dynamo.utils import get_compilation_metrics

    found = [
        metrics.recompile_reason.partition(": ")[2].strip() or metrics.recompile_reason
        for metrics in get_compilation_metrics()
        if metrics.recompile_reason and (metrics.start_time or 0.0) >= since
    ]
    return "; ".join(dict.fromkeys(found))
