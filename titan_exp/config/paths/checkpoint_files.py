"""Files of checkpoints: their places by step, and their manifests."""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.paths.foreign_file import count, parse_object, read_file, table, text

COMPLETE_NAME = re.compile(r"step-(\d{8,})")
"""Pattern of a complete checkpoint's folder name."""
METADATA_FILE = ".metadata"
"""DCP metadata file in a checkpoint's folder."""


def step_name(step: int) -> str:
    """Folder name of a complete checkpoint."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int | None:
    """Step of a complete checkpoint, from its folder's name; None for another folder."""
    complete = COMPLETE_NAME.fullmatch(checkpoint.name)
    return int(complete[1]) if complete else None


def saved_state(path_text: str) -> Path | None:
    """Checkpoint at a path: the folder itself, or the newest complete one of a run folder or its `checkpoints/`."""
    path = Path(path_text).expanduser()
    if (path / METADATA_FILE).is_file() and not path.name.endswith(".partial"):
        return path
    for folder in (path / "checkpoints", path):
        if folder.is_dir():
            found = [
                entry
                for entry in folder.iterdir()
                if COMPLETE_NAME.fullmatch(entry.name) and (entry / METADATA_FILE).is_file()
            ]
            if found:
                return max(found, key=lambda entry: int(entry.name.removeprefix("step-")))
    return None


def huggingface_folder(path_text: str) -> Path | None:
    """Path of a Hugging Face folder with weights; None for anything else."""
    path = Path(path_text).expanduser()
    return path if (path / "config.json").is_file() and any(path.glob("*.safetensors")) else None


def initial_folder(path_text: str) -> Path | None:
    """Weights of `checkpoint.initial`: a Hugging Face folder, or the checkpoint at a path."""
    return huggingface_folder(path_text) or saved_state(path_text)


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
            raise UserError(f"{key} is {written[:20]!r}, which is not a checksum.")
        checksums[name] = FileChecksum(count(values.get("size"), f"size of {name}"), int(written, 16))
    return checksums


def parse_index(content: bytes | str, name: str) -> dict[str, str]:
    """File by tensor name in the content of an index, without folders: files lie beside it. Raises UserError if it is
    damaged; `name` names it."""
    listed = table(parse_object(content, name).get("weight_map"), f"{name}: weight_map")
    return {tensor: Path(text(file, f"{name}: the file of {tensor}")).name for tensor, file in listed.items()}


def missing_part(path: Path) -> str | None:
    """Missing part of a checkpoint or a Hugging Face folder, by names and sizes; None if it is complete.

    Reads no tensors.
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
        raise UserError(f"{path.name} has no header, so its download was not complete") from error
    end = 0
    for name, entry in header.items():
        if name != "__metadata__":
            offsets = table(entry, name).get("data_offsets")
            if not isinstance(offsets, list) or len(offsets) != 2:
                raise UserError(f"{path.name}: {name} has no data_offsets")
            end = max(end, count(offsets[1], f"{path.name}: the end of {name}"))
    return 8 + length + end
