"""Compile report: time of the first compilation, and unexpected recompilations."""

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.run_folder.folder_owner import own_folder
from titan_exp.tracking.run_folder.run_folder import RunFolder

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable for the cache of inductor, its Triton kernels and AOTAutograd."""


def set_compile_cache(folder: RunFolder, run_name: str) -> None:
    """Set the compile cache of this process, unless the user has set one. Call it before anything compiles.

    Entries are keyed by a hash of the graph, torch's version and its settings, so runs and ranks share them safely.
    torch unpickles and executes them, so users do not share them. torch never deletes them.
    """
    if VARIABLE not in os.environ:
        with contextlib.suppress(UserError, OSError):  # another user's: torch's own default then
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
"""Maximum number of warnings per run."""


class CompileReport:
    """Logs compilation in this process, from torch's counters.

    Compilation is expected in the first step and the first evaluation of an attempt. Later it means that shapes or
    settings changed.
    """

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._before = _Counters.read()
        self._read_at = time.time()
        self._begun: set[str] = set()
        self._compiled = 0
        self._warnings = 0

    def after(self, phase: str, step: int) -> None:
        """Log compilation since the last call, attributed to `phase` ("step" or "evaluation") of `step`."""
        compiled, first = _records_of_compilation(), phase not in self._begun
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
            "recompiled in the %s at step %d, which took %.1f s: %s. To log every reason, set "
            "TORCH_LOGS=recompiles. To train without compilation, use compile=none%s"
        )
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


def _records_of_compilation() -> int:
    """Number of times that compilation has been recorded in this process."""
    if "torch._dynamo.utils" not in sys.modules:
        return 0
    from torch._dynamo.utils import compilation_time_metrics

    return sum(map(len, compilation_time_metrics.values()))


def _reasons(since: float) -> str:
    """Distinct reasons of guard failures since a time, without frame numbers."""
    from torch._dynamo.utils import get_compilation_metrics

    found = [
        metrics.recompile_reason.partition(": ")[2].strip() or metrics.recompile_reason
        for metrics in get_compilation_metrics()
        if metrics.recompile_reason and (metrics.start_time or 0.0) >= since
    ]
    return "; ".join(dict.fromkeys(found))
