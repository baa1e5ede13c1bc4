"""Output of commands: standard streams without secrets and control characters, and one JSON document for a program."""

import codecs
import io
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from contextvars import ContextVar
from typing import Any, TextIO, cast

from titan_exp.config.errors.explained_errors import explain_os_error
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.secrets import concealed

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udc7f\udd00-\udfff]+")
"""Control characters but tab and newline, directions of text, and halves of characters, which have no encoding; the
surrogates that stand for bytes of a path are left."""


def visible(text: str) -> str:
    """Text whose control characters are written out, such as `\\x1b`, which a terminal would obey."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def safe_output(encoding: str | None = None, *, raw: bool = False) -> None:
    """Make standard output and error safe, once: secrets become their interpolations, and control characters visible. A
    question mark stands for a character that `encoding` lacks, None keeps that of the locale; other bytes of a path are
    printed as they are. `raw` keeps control characters, for the log of a rank."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            unicode = codecs.lookup(encoding or stream.encoding).name == "utf-8"
            stream.reconfigure(encoding=encoding, errors="surrogateescape" if unicode else "replace")
        if not isinstance(stream, _SafeOutput):
            setattr(sys, name, cast(TextIO, _SafeOutput(stream, raw)))


class _SafeOutput:
    def __init__(self, stream: TextIO, raw: bool) -> None:
        self._stream, self._raw = stream, raw

    @property
    def rich_proxied_file(self) -> TextIO:
        """Stream for rich, which writes escape sequences of its own; `Terminal` makes its texts safe."""
        return self._stream

    def write(self, text: str) -> int:
        """Write a text."""
        text = concealed(text)
        self._stream.write(text if self._raw else visible(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


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
