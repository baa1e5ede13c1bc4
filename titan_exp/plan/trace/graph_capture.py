"""CUDA graph capture on fake tensors: a pass whose memory is the graph's own pool, and whose replays launch nothing."""

from collections.abc import Callable

import torch

from titan_exp.plan.trace.dispatch_mode import CostMode, OpCosts
from titan_exp.plan.trace.segments import sum_costs
from titan_exp.trainer.cuda_graphs import Recording

CAPTURE = torch.cpu.Stream()
"""Current stream of captured passes."""


class FakeRecorder:
    """Runs the first pass as a warm-up, on a stream of its own, and the next ones as if captured; replays only count
    their costs."""

    def __init__(self) -> None:
        self.mode: CostMode | None = None
        """Mode that records operators, if any does."""
        self._stream = torch.cpu.Stream()

    def warmup(self, work: Callable[[], None]) -> None:
        """Run the work."""
        with torch.cpu.stream(self._stream):  # type: ignore[arg-type]  # torch's annotation lacks its own CPU stream
            work()
        self._stream = CAPTURE

    def record(self, work: Callable[[], None]) -> Recording:
        """Run the work."""
        before = self._costs()
        self.warmup(work)
        once = sum_costs([self._costs(), sum_costs([before], -1)])

        def replay() -> None:
            if self.mode is not None:
                self.mode.costs = sum_costs([self.mode.costs, once])

        return Recording(replay, "a plan")

    def _costs(self) -> OpCosts:
        return sum_costs([] if self.mode is None else [self.mode.costs])
