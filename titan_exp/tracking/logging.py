"""What a rank says: rank 0 speaks to people on its standard output, other ranks write warnings to their own file."""

import logging
import sys
from pathlib import Path


def get_logger() -> logging.Logger:
    """The logger of the whole package."""
    return logging.getLogger("titan_exp")


def configure_logging(rank: int, logs: Path) -> None:
    """Set up this process: rank 0 logs to standard output, any other rank only warnings, to `logs/rank-<rank>.log`.

    Warnings of Python and of libraries come the same way, each text once. May be called again; the last call holds.
    """
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler.formatter, _Lines)]:
        root.removeHandler(handler)
        handler.close()
    handler = _handler(rank, logs)
    handler.setFormatter(_Lines())
    handler.addFilter(_Once())
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    get_logger().setLevel(logging.INFO)
    logging.captureWarnings(True)


def _handler(rank: int, logs: Path) -> logging.Handler:
    if rank == 0:
        return logging.StreamHandler(sys.stdout)
    logs.mkdir(parents=True, exist_ok=True)
    # The file appears with the first warning: thousands of empty ones help nobody.
    handler = logging.FileHandler(logs / f"rank-{rank}.log", delay=True)
    handler.setLevel(logging.WARNING)
    return handler


class _Lines(logging.Formatter):
    """Time, the level where it matters, and the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno >= logging.WARNING:
            record.message = f"{record.levelname.lower()}: {record.message.strip()}"
        return super().formatMessage(record)


class _Once(logging.Filter):
    """Lets each warning of another library through once; our own loggers say what they mean to."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.partition(".")[0] == "titan_exp":
            return True
        text = record.getMessage()
        if text in self._seen:
            return False
        self._seen.add(text)
        return True
