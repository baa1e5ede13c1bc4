"""Warnings about your data: shown as a sentence, without the line of our code that noticed the problem."""

import warnings
from functools import wraps
from typing import Any


class DataWarning(UserWarning):
    """Warning about your data."""


def warn(sentence: str) -> None:
    """Warn about the data, once per process."""
    warnings.warn(sentence, DataWarning, stacklevel=2)


_format = warnings.formatwarning


@wraps(_format)
def _format_plainly(message: Any, category: type[Warning], *where: Any, **line: Any) -> str:
    return f"{message}\n" if issubclass(category, DataWarning) else _format(message, category, *where, **line)


warnings.formatwarning = _format_plainly
