"""Standard output and error, through which all text is printed: without secrets and without control characters, which
names, tags and reasons of foreign runs may hold."""

import codecs
import io
import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO, cast

from titan_exp.config.secrets import concealed

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udc7f\udd00-\udfff]+")
"""Control characters but tab and newline, directions of text, and halves of characters, which have no encoding; the
surrogates that stand for bytes of a path are left."""


def visible(text: str) -> str:
    """Text whose control characters are written out, such as `\\x1b`, which a terminal would obey."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def safe_output(encoding: str | None = None, *, raw: bool = False) -> None:
    """Make standard output and error safe, once: secrets become their interpolations, and control characters visible.

    A question mark stands for a character that `encoding` lacks, None keeps that of the locale; other bytes of a path
    are printed as they are. `raw` keeps control characters, for the log of a rank.
    """
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
