"""Compile report: time of the first compilation, and unexpected recompilations."""

import os
import sys
import time
from typing import NamedTuple

from titan_exp.tracking.logging import get_logger
from titan_exp.trainer.profiling.compile_cache import VARIABLE

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
        self._warnings = 0

    def after(self, phase: str, step: int) -> None:
        """Log compilation since the last call, attributed to `phase` ("step" or "evaluation") of `step`."""
        now, first = _Counters.read(), phase not in self._begun
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
        found = f"; {cached} of {graphs} graphs were found in {os.environ.get(VARIABLE)}" if graphs else ""
        if tuned := now.tuned - self._before.tuned:
            timed = now.tuning_seconds - self._before.tuning_seconds
            found += f"; {tuned} matmuls were autotuned, in {timed:.1f} s of it"
        get_logger().info("first %s: compilation took %.1f s%s%s", phase, seconds, total, found)

    def _warn(self, phase: str, step: int, seconds: float) -> None:
        self._warnings += 1
        if self._warnings > MAX_WARNINGS:
            return
        text = (
            "recompiled in the %s at step %d, which took %.1f s: %s. TORCH_LOGS=recompiles logs every reason; "
            "compile=none disables compilation%s"
        )
        last = "; further recompilations are not logged" if self._warnings == MAX_WARNINGS else ""
        get_logger().warning(text, phase, step, seconds, _reasons(self._read_at) or "no reason is known", last)


class _Counters(NamedTuple):
    """Compilation counters of this process."""

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
    """Distinct reasons of guard failures, without frame numbers."""
    from torch._dynamo.utils import get_compilation_metrics

    found = [
        metrics.recompile_reason.partition(": ")[2].strip() or metrics.recompile_reason
        for metrics in get_compilation_metrics()
        if metrics.recompile_reason and (metrics.start_time or 0.0) >= since
    ]
    return "; ".join(dict.fromkeys(found))
