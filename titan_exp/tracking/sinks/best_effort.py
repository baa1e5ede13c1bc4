"""Best-effort sink: disabled with a warning after its first failure; the run continues."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.sinks.sink import ImageSink, Row, Sink

if TYPE_CHECKING:
    import numpy as np


class BestEffortSink:
    """Wraps the sink built by `start`; suppresses all its exceptions, including construction."""

    def __init__(self, name: str, switch: str, start: Callable[[], Sink]) -> None:
        self._name, self._switch = name, switch
        self._sink: Sink | None = None
        self._guard(self._start, start)

    def log(self, row: Row) -> None:
        """Forward the row while the sink works."""
        if self._sink is not None:
            self._guard(self._sink.log, row)

    def image(self, name: str, step: int, image: np.ndarray) -> None:
        """Forward an image while the sink works, if it takes images."""
        if self._sink is not None and isinstance(self._sink, ImageSink):
            self._guard(self._sink.image, name, step, image)

    def close(self, state: str) -> None:
        """Close the sink if it still works."""
        sink, self._sink = self._sink, None
        if sink is not None:
            self._guard(sink.close, state)

    def _start(self, start: Callable[[], Sink]) -> None:
        self._sink = start()

    def _guard(self, action: Callable[..., None], *arguments: object) -> None:
        try:
            action(*arguments)
        except Exception as error:  # a network, a server and a disk may fail in any way
            self._sink = None
            reason = str(error).strip().partition("\n")[0] or "no reason given"
            get_logger().warning(
                "%s gets no more metrics (%s: %s). The run continues and metrics.jsonl has everything; %s=false turns "
                "this sink off.",
                self._name,
                type(error).__name__,
                reason,
                self._switch,
            )
