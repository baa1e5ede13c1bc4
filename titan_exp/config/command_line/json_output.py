"""JSON output of a command for a program: one document on standard output, and text for people on standard error."""

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from contextvars import ContextVar
from typing import Any

from titan_exp.config.errors.explained_errors import explain_os_error
from titan_exp.config.errors.user_error import UserError

FLAGS = frozenset({"--json", "--json=true", "json=true"})
"""Spellings of the flag."""

_answers: ContextVar[list[Any] | None] = ContextVar("answers", default=None)


def answer(document: Any) -> None:
    """Set the document of a command. `json_output` prints it at the end; outside of it, it is printed at once."""
    found = _answers.get()
    if found is None:
        print(json_text(document))
    else:
        found[:] = [document]


@contextmanager
def json_output() -> Iterator[None]:
    """Print the document of `answer` at the end of the block, or that of the exception that ends it. All else that the
    block and its child processes print goes to standard error."""
    found = list[Any]()
    token = _answers.set(found)
    try:
        with _for_people():
            yield
    except BaseException as error:
        if not isinstance(error, SystemExit) or not found:  # a sweep with failed runs has answered
            found[:] = [error_document(error)]
        raise
    finally:
        _answers.reset(token)
        print(json_text(found[0] if found else None))


def json_text(document: Any) -> str:
    """JSON of a value. It is ASCII, which no encoding of the output changes; `null` stands for NaN and infinity."""
    text = json.dumps(plain(document), indent=1, allow_nan=False)
    return text.replace("\x7f", "\\u007f")  # a control character that JSON leaves and `visible` would not


def plain(value: Any) -> Any:
    """Convert to JSON values: non-finite numbers become None, tuples become lists, other objects become text."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return float(value) if math.isfinite(value) else None
        case Mapping():
            return {str(key): plain(part) for key, part in value.items()}
        case list() | tuple():
            return [plain(part) for part in value]
    return str(value)


def error_document(error: BaseException) -> dict[str, Any]:
    """Error as JSON values: its message, and the violations of a configuration or of options."""
    violations, message = [], ""
    if isinstance(error, UserError):
        message = error.message
        violations = [
            {"key": one.field, "value": one.value, "reason": one.reason, "remedy": one.remedy}
            for one in error.violations
        ]
    elif isinstance(error, OSError | RuntimeError):
        message = explain_os_error(error) or ""
    return {"error": {"message": message or f"{type(error).__name__}: {error}".rstrip(": "), "violations": violations}}


@contextmanager
def _for_people() -> Iterator[None]:
    """Redirect standard output to standard error, of this process and of its children."""
    with redirect_stdout(sys.stderr):
        before = None
        with suppress(OSError):  # closed
            before = os.dup(1)
            os.dup2(2, 1)
        try:
            yield
        finally:
            if before is not None:
                os.dup2(before, 1)
                os.close(before)
