"""Files of a checkpoint or of a folder of weights on this machine: those that its own lists name, and their sizes."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.paths.checkpoint_paths import METADATA_FILE, step_of
from titan_exp.config.paths.foreign_file import read_file
from titan_exp.config.paths.foreign_json import count, parse_object, table, text

CHECKSUMS_FILE = "checksums.json"
"""File of a checkpoint's checksums, written last."""
INDEX = "model.safetensors.index.json"
"""Index from tensor names to files in a Hugging Face folder."""
_HEADER_BYTES = 100_000_000
"""Largest header that the library of safetensors reads."""


@dataclass(frozen=True)
class FileChecksum:
    """Size and CRC-32 of a file."""

    size: int
    """Bytes."""
    crc32: int
    """CRC-32 of the content."""


def parse_checksums(content: bytes | str) -> dict[str, FileChecksum]:
    """Checksums by file name in the content of `checksums.json`. Raises UserError if it is damaged."""
    checksums: dict[str, FileChecksum] = {}
    for name, entry in table(parse_object(content, CHECKSUMS_FILE).get("files"), "files").items():
        values, key = table(entry, name), f"crc32 of {name}"
        written = text(values.get("crc32"), key)
        # int() also accepts capitals, which a flipped bit may produce.
        if len(written) != 8 or set(written) - set("0123456789abcdef"):
            raise UserError(f"{key} is {written[:20]!r}, and no checksum as it is written.")
        checksums[name] = FileChecksum(count(values.get("size"), f"size of {name}"), int(written, 16))
    return checksums


def parse_index(content: bytes | str, name: str) -> dict[str, str]:
    """File by tensor name in the content of an index, without folders: files lie beside it. Raises UserError if it is
    damaged; `name` names it."""
    listed = table(parse_object(content, name).get("weight_map"), f"{name}: weight_map")
    return {tensor: Path(text(file, f"{name}: the file of {tensor}")).name for tensor, file in listed.items()}


def missing_part(path: Path) -> str | None:
    """What is missing of a checkpoint or a Hugging Face folder, by names and sizes; None if all of it is there.

    Content is not read: whoever loads it does.
    """
    try:
        expected = _checkpoint_sizes(path) if (path / METADATA_FILE).is_file() else _folder_sizes(path)
        for name, size in expected:
            try:
                found = (path / name).stat().st_size
            except OSError as error:
                return f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name} cannot be read"
            if found != size:
                return f"{name} has {found:,} bytes instead of {size:,}"
    except UserError as error:
        return str(error)
    return None


def intact_before(checkpoint: Path) -> Path | None:
    """Newest checkpoint beside an incomplete one of which nothing is missing; None if there is none."""
    steps = {step: entry for entry in checkpoint.parent.glob("step-*") if (step := step_of(entry)) is not None}
    others = (steps[step] for step in sorted(steps, reverse=True) if steps[step] != checkpoint)
    return next((path for path in others if (path / METADATA_FILE).is_file() and missing_part(path) is None), None)


def _checkpoint_sizes(path: Path) -> Iterator[tuple[str, int]]:
    if (path / CHECKSUMS_FILE).is_file():
        files = parse_checksums(read_file(path / CHECKSUMS_FILE))
        yield from ((name, entry.size) for name, entry in files.items())


def _folder_sizes(path: Path) -> Iterator[tuple[str, int]]:
    index = path / INDEX
    listed = parse_index(read_file(index), INDEX).values() if index.is_file() else ()
    for name in sorted({*listed} or {file.name for file in path.glob("*.safetensors")}):
        yield name, _safetensors_size(path / name)


def _safetensors_size(path: Path) -> int:
    """Size of a file by its header."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = parse_object(file.read(min(length, _HEADER_BYTES)), path.name)
    except OSError as error:
        raise UserError(f"{path.name} is missing" if isinstance(error, FileNotFoundError) else str(error)) from error
    except struct.error as error:
        raise UserError(f"{path.name} has no header: it was not downloaded completely") from error
    end = 0
    for name, entry in header.items():
        if name != "__metadata__":
            offsets = table(entry, name).get("data_offsets")
            if not isinstance(offsets, list) or len(offsets) != 2:
                raise UserError(f"{path.name}: {name} has no data_offsets")
            end = max(end, count(offsets[1], f"{path.name}: the end of {name}"))
    return 8 + length + end
