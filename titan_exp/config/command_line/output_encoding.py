"""Encoding of standard output and error, which a locale may limit to ASCII or Latin-1."""

import codecs
import io
import sys


def replace_unencodable(encoding: str | None = None) -> None:
    """Print a question mark for a character that `encoding` lacks, and other bytes of a path as they are; None keeps
    the encoding of the locale."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            unicode = codecs.lookup(encoding or stream.encoding).name == "utf-8"
            stream.reconfigure(encoding=encoding, errors="surrogateescape" if unicode else "replace")
