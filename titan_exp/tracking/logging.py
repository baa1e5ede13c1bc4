"""Rank logging: rank 0 to standard output, warnings of other ranks to one file each."""

import contextlib
import logging
import sys
from pathlib import Path
from typing import TextIO

from titan_exp.config.secrets import concealed


def get_logger() -> logging.Logger:
    """Package logger."""
    return logging.getLogger("titan_exp")


def configure_logging(rank: int, logs: Path) -> None:
    """Configure logging: rank 0 logs to standard output, other ranks log warnings to `logs/rank-<rank>.log`.

    Warnings of Python and of libraries are included, each text once. A later call replaces an earlier one.
    """
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler.formatter, _Formatter)]:
        root.removeHandler(handler)
        handler.close()
    handler = _handler(rank, logs)
    handler.setFormatter(_Formatter())
    handler.addFilter(_OnceFilter())
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    get_logger().setLevel(logging.INFO)
    logging.captureWarnings(True)


def _handler(rank: int, logs: Path) -> logging.Handler:
    if rank == 0:
        return _StreamHandler(sys.stdout)
    logs.mkdir(exist_ok=True)
    # Created with the first warning, to avoid thousands of empty files.
    handler = _FileHandler(logs / f"rank-{rank}.log", delay=True)
    handler.setLevel(logging.WARNING)
    return handler


class _Lossy(logging.Handler):
    """Drops lines that a full or read-only disk cannot take; logging itself would print a traceback."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


class _StreamHandler(_Lossy, logging.StreamHandler[TextIO]):
    pass


class _FileHandler(_Lossy, logging.FileHandler):
    def emit(self, record: logging.LogRecord) -> None:
        # With `delay`, the file is opened here, outside logging's own error handling.
        with contextlib.suppress(OSError):
            super().emit(record)


class _Formatter(logging.Formatter):
    """Formats time, level of warnings and errors, and message, with secrets masked."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno >= logging.WARNING:
            record.message = f"{record.levelname.lower()}: {record.message.strip()}"
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        return concealed(super().format(record))


class _OnceFilter(logging.Filter):
    """Passes each message of other libraries once, and all messages of titan_exp."""

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
