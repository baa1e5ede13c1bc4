"""Files of checkpoints: places by step and manifests, URLs of remote folders, the run that another one continues."""

import importlib.util
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.foreign_file import count, parse_object, read_file, table, text

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
        entries = [entry for entry in folder.iterdir() if (entry / METADATA_FILE).is_file()] if folder.is_dir() else []
        if found := {step: entry for entry in entries if (step := step_of(entry)) is not None}:
            return found[max(found)]
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
    """Missing part of a checkpoint or a Hugging Face folder, by names and sizes; None if it is complete. Reads no
    tensors."""
    try:
        for name, size in _expected_sizes(path):
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


def _expected_sizes(path: Path) -> Iterator[tuple[str, int]]:
    if (path / METADATA_FILE).is_file():
        if (path / CHECKSUMS_FILE).is_file():
            files = parse_checksums(read_file(path / CHECKSUMS_FILE))
            yield from ((name, entry.size) for name, entry in files.items())
        return
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


_URL = re.compile(r"(?P<protocol>[A-Za-z][A-Za-z0-9+.-]+)://(?P<rest>.*)", re.DOTALL)
_IN_PROCESS = ("memory",)
"""Protocols whose data does not outlive the process."""
_PIP = {"huggingface_hub": "huggingface_hub", "google": "gcsfs", "libarchive": "libarchive-c"}
"""PyPI names of packages whose module name differs."""


def is_url(path: str) -> bool:
    """True for a URL (`s3://bucket/prefix`, `file:///mnt/share`), False for a path."""
    return _URL.match(path) is not None


def joined(url: str, *names: str) -> str:
    """Append names to the path of a URL."""
    return "/".join((url.rstrip("/"), *names))


def problem_of_url(url: str) -> tuple[str, str] | None:
    """Reason why a URL cannot be used, and a remedy; None if it can. Uses no network and imports no package. The texts
    do not repeat the URL, which may contain a credential."""
    if "::" in url:
        return "titan_exp does not support chains of protocols (a::b)", "use the URL of the store itself"
    match = _URL.match(url)
    if match is None:
        return "this is not a URL", "write it as in s3://bucket/prefix, gs://bucket/prefix or file:///mnt/share/prefix"
    user, at, _ = match["rest"].partition("/")[0].rpartition("@")
    if (at and ":" in user) or "?" in url or "#" in url:
        reason = "titan_exp writes the URL into the run folder, and user:password@ or ?key=… in it may be a credential"
        variables = "AWS_ACCESS_KEY_ID, AWS_PROFILE, GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN, …"
        return reason, f"leave that part out, and give credentials in the environment ({variables})"
    return _problem_of_protocol(match["protocol"])


def _problem_of_protocol(protocol: str) -> tuple[str, str] | None:
    from fsspec.registry import known_implementations, registry

    if protocol in _IN_PROCESS:
        return "what this protocol stores ends with the process", "use s3://…, gs://… or file:///…"
    if protocol in registry:
        return None
    known = known_implementations.get(protocol)
    if known is None:
        usual = [name for name in ("abfs", "file", "gs", "hf", "s3", "sftp", "smb") if name in known_implementations]
        return f"fsspec knows no protocol {protocol}://", f"use one of {', '.join(usual)}"
    module = str(known["class"]).partition(".")[0]
    if importlib.util.find_spec(module) is None:
        return f"this protocol needs the package {module}", f"type pip install {_PIP.get(module, module)}"
    return None


def normalize_parent(typed: str, runs: Path) -> tuple[str, int | None]:
    """Parent run, and the step if one of its checkpoints is named. The run is NAME/ID if it is in the folder of runs,
    else its absolute path or its URL. A path that does not exist stays as it is."""
    if is_url(typed) or not Path(typed).expanduser().exists():
        return typed, None
    path, step = Path(os.path.abspath(Path(typed).expanduser())), None
    if step_of(path) is not None and path.parent.name == "checkpoints":
        path, step = path.parent.parent, step_of(path)
    elif path.name == "checkpoints":
        path = path.parent
    within = os.path.relpath(path, os.path.abspath(runs))
    return (within if within.count("/") == 1 and not within.startswith("..") else str(path)), step


def parent_location(parent: str, runs: Path) -> str:
    """Path or URL of a normalized parent."""
    return parent if is_url(parent) or os.path.isabs(parent) else str(runs / parent)


def parent_checkpoint(location: str, step: int | None) -> Path | None:
    """Complete checkpoint at a path: of a run's step, or its newest, or the checkpoint itself."""
    if step is None:
        return saved_state(location)
    path = Path(location) / "checkpoints" / step_name(step)
    return path if (path / METADATA_FILE).is_file() else None
