"""Whether a checkpoint is what was written: a file beside its files says size and CRC-32 of each.

CRC-32 finds every burst of up to 32 flipped bits and misses other damage once in 2^32; it is no seal against intent.
"""

import json
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from titan_exp.checkpoint.dcp.storage_reader import min_file_sizes
from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.run_folder.run_folder import write_atomically

CHECKSUMS_FILE = "checksums.json"
"""Written last."""
METADATA_FILE = ".metadata"
"""torch's table of contents."""
_CHUNK = 8 * 2**20
_THREADS = 4


@dataclass(frozen=True)
class FileChecksum:
    """What a file holds, in short."""

    size: int
    """Bytes."""
    crc32: int
    """Of all bytes."""


def write_checksums(path: Path, sums: Mapping[str, FileChecksum]) -> None:
    """Write the sums of a checkpoint's files beside them."""
    files = {name: {"size": one.size, "crc32": f"{one.crc32:08x}"} for name, one in sorted(sums.items())}
    write_atomically(path / CHECKSUMS_FILE, json.dumps({"files": files}, indent=1) + "\n")


def parse_checksums(text: str) -> dict[str, FileChecksum]:
    """Sums of a checkpoint's files by name, from the text of their file.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is not such a text.
    """
    files = json.loads(text)["files"]
    return {name: FileChecksum(one["size"], int(one["crc32"], 16)) for name, one in files.items()}


def has_checksums(path: Path) -> bool:
    """Whether a checkpoint has any; those from before they were written have none."""
    return (path / CHECKSUMS_FILE).exists()


def find_damage(path: Path, share: int = 0, shares: int = 1) -> str | None:
    """What is wrong with a checkpoint's files, naming the first; None where nothing is.

    Args:
        path: folder of the checkpoint.
        share: which of the files to read, so that every rank reads others; each file belongs to one share.
        shares: into how many the files are divided.
    """
    try:
        if not has_checksums(path):
            return _problem_of_sizes(path) if share == 0 else None
        sums = _read_sums(path)
    except Exception as error:  # Damaged bytes break JSON and pickles in any way they like.
        return f"what it consists of cannot be read ({type(error).__name__}: {error})"
    if METADATA_FILE not in sums:
        return f"{CHECKSUMS_FILE} does not name {METADATA_FILE}"
    names = sorted(sums)[share::shares]
    with ThreadPoolExecutor(_THREADS) as threads:
        found = threads.map(lambda name: find_file_damage(path / name, sums[name]), names)
        return next((one for one in found if one is not None), None)


def find_damage_on_ranks(path: Path, group: dist.ProcessGroup | None) -> str | None:
    """`find_damage` of all files, each read by one rank of the group; the same answer on all of them.

    Without a process group, this process reads all files.
    """
    if not dist.is_initialized():
        return find_damage(path)
    world = dist.get_world_size(group)
    found: list[str | None] = [None] * world
    dist.all_gather_object(found, find_damage(path, dist.get_rank(group), world), group=group)
    return next((one for one in found if one is not None), None)


def require_intact(path: Path, group: dist.ProcessGroup | None = None) -> None:
    """Check a checkpoint that was asked for by name; all ranks of the group together.

    Raises:
        UserError: it is damaged.
    """
    damage = find_damage_on_ranks(path, group)
    if damage is not None:
        raise UserError(f"The checkpoint {path} is damaged: {damage}. Name an older one, or another copy of it.")


def _read_sums(path: Path) -> dict[str, FileChecksum]:
    return parse_checksums((path / CHECKSUMS_FILE).read_text(encoding="utf-8"))


def find_file_damage(path: Path, expected: FileChecksum) -> str | None:
    """What is wrong with a file; None where it is as it was written."""
    try:
        size = path.stat().st_size
        if size != expected.size:
            return f"{path.name} has {size:,} bytes instead of {expected.size:,}"
        return None if _crc32(path) == expected.crc32 else f"{path.name} does not have the checksum that was written"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror or error})"


def _crc32(path: Path) -> int:
    crc, buffer = 0, memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
    return crc


def _problem_of_sizes(path: Path) -> str | None:
    """Without checksums: every file is long enough for what the table of contents says of it."""
    for name, end in sorted(min_file_sizes(path).items()):
        file = path / name
        if not file.exists():
            return f"{name} is missing"
        if file.stat().st_size < end:
            return f"{name} has {file.stat().st_size:,} bytes instead of {end:,}"
    return None
