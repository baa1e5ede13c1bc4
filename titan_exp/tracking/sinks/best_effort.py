"""A mirror of the metrics may break; the run must not. The first failure is one warning, then silence."""

from collections.abc import Callable

from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.sinks.sink import Row, Sink


class BestEffortSink:
    """A sink that `start` makes, kept from ending the run: whatever it raises, the run's own metrics go on."""

    def __init__(self, name: str, switch: str, start: Callable[[], Sink]) -> None:
        self._name, self._switch = name, switch
        self._sink: Sink | None = None
        self._guard(self._start, start)

    def log(self, row: Row) -> None:
        """Pass the row on while the sink works."""
        if self._sink is not None:
            self._guard(self._sink.log, row)

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
        except Exception as error:  # a mirror stands on a network, a server and a disk, and may fail in any way
            self._sink = None
            reason = str(error).strip().partition("\n")[0] or "no reason given"
            get_logger().warning(
                "%s gets no more metrics (%s: %s). The run goes on and metrics.jsonl has everything; %s=false turns "
                "this mirror off.",
                self._name,
                type(error).__name__,
                reason,
                self._switch,
            )
