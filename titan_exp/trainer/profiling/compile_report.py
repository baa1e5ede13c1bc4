"""Compile report: time of the first compilation, and unexpected recompilations."""

import os
import sys
import time
from typing import NamedTuple

from titan_exp.tracking.logging import get_logger
from titan_exp.trainer.profiling.compile_cache import VARIABLE

MOST_WARNINGS = 3
"""Maximum number of warnings per run."""


class CompileReport:
    """Watches torch's own account of compilation, that of this process.

    Compiling is expected in the first step and the first evaluation of an attempt. Later it means that shapes or
    settings change while the run continues.
    """

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._before = _Account.read()
        self._read_at = time.time()
        self._begun: set[str] = set()
        self._warnings = 0

    def after(self, what: str, step: int) -> None:
        """Say what was compiled since the last call, all of it for `what` ("step" or "evaluation") at `step`."""
        now, first = _Account.read(), what not in self._begun
        seconds = now.seconds - self._before.seconds
        if seconds > 0 and first:
            self._say_first(what, seconds, now)
        elif seconds > 0:
            self._warn(what, step, seconds)
        self._begun.add(what)
        self._before, self._read_at = now, time.time()

    def _say_first(self, what: str, seconds: float, now: "_Account") -> None:
        graphs, cached = now.graphs - self._before.graphs, now.cached - self._before.cached
        of = f" of {time.perf_counter() - self._since:.1f} s" if what == "step" else ""
        # Backends that generate no code keep none.
        found = f"; {cached} of {graphs} graphs were found in {os.environ.get(VARIABLE)}" if graphs else ""
        get_logger().info("first %s: compilation took %.1f s%s%s", what, seconds, of, found)

    def _warn(self, what: str, step: int, seconds: float) -> None:
        self._warnings += 1
        if self._warnings > MOST_WARNINGS:
            return
        text = (
            "compiled again in the %s at step %d, which took %.1f s: %s. TORCH_LOGS=recompiles names every reason; "
            "compile=none compiles nothing%s"
        )
        last = "; this is not said again" if self._warnings == MOST_WARNINGS else ""
        get_logger().warning(text, what, step, seconds, _reasons(self._read_at) or "no reason is known", last)


class _Account(NamedTuple):
    """Totals of this process."""

    seconds: float = 0.0
    graphs: int = 0
    cached: int = 0

    @staticmethod
    def read() -> "_Account":
        # Importing the compiler takes seconds: if it is not imported, nothing was compiled.
        if "torch._dynamo.utils" not in sys.modules:
            return _Account()
        from torch._dynamo.utils import calculate_time_spent, counters

        seconds = calculate_time_spent()["total_wall_time"]
        inductor = counters["inductor"]
        cached, compiled = inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"]
        return _Account(seconds, cached + compiled + inductor["fxgraph_cache_bypass"], cached)


def _reasons(since: float) -> str:
    """Why guards failed, each reason once, without the number of the compiled frame before it."""
    from torch._dynamo.utils import get_compilation_metrics

    found = [
        metrics.recompile_reason.partition(": ")[2].strip() or metrics.recompile_reason
        for metrics in get_compilation_metrics()
        if metrics.recompile_reason and (metrics.start_time or 0.0) >= since
    ]
    return "; ".join(dict.fromkeys(found))
