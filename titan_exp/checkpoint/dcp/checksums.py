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

from titan_exp.checkpoint.dcp.reader import extents
from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.run_folder.run_folder import write_atomically

SUMS = "checksums.json"
"""Written last."""
TABLE = ".metadata"
"""torch's table of contents."""
_CHUNK = 8 * 2**20
_THREADS = 4


@dataclass(frozen=True)
class FileSum:
    """What a file holds, in short."""

    size: int
    """Bytes."""
    crc32: int
    """Of all bytes."""


def write_sums(path: Path, sums: Mapping[str, FileSum]) -> None:
    """Write the sums of a checkpoint's files beside them."""
    files = {name: {"size": one.size, "crc32": f"{one.crc32:08x}"} for name, one in sorted(sums.items())}
    write_atomically(path / SUMS, json.dumps({"files": files}, indent=1) + "\n")


def parse_sums(text: str) -> dict[str, FileSum]:
    """Sums of a checkpoint's files by name, from the text of their file.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is not such a text.
    """
    files = json.loads(text)["files"]
    return {name: FileSum(one["size"], int(one["crc32"], 16)) for name, one in files.items()}


def has_sums(path: Path) -> bool:
    """Whether a checkpoint has any; those from before they were written have none."""
    return (path / SUMS).exists()


def problem(path: Path, share: int = 0, shares: int = 1) -> str | None:
    """What is wrong with a checkpoint's files, naming the first; None where nothing is.

    Args:
        path: folder of the checkpoint.
        share: which of the files to read, so that every rank reads others; each file belongs to one share.
        shares: into how many the files are divided.
    """
    try:
        if not has_sums(path):
            return _problem_of_sizes(path) if share == 0 else None
        sums = _read_sums(path)
    except Exception as error:  # Damaged bytes break JSON and pickles in any way they like.
        return f"what it consists of cannot be read ({type(error).__name__}: {error})"
    if TABLE not in sums:
        return f"{SUMS} does not name {TABLE}"
    names = sorted(sums)[share::shares]
    with ThreadPoolExecutor(_THREADS) as threads:
        found = threads.map(lambda name: problem_of_file(path / name, sums[name]), names)
        return next((one for one in found if one is not None), None)


def agreed_problem(path: Path, group: dist.ProcessGroup | None) -> str | None:
    """`problem` of all files, each read by one rank of the group; the same answer on all of them.

    Without a process group, this process reads all files.
    """
    if not dist.is_initialized():
        return problem(path)
    world = dist.get_world_size(group)
    found: list[str | None] = [None] * world
    dist.all_gather_object(found, problem(path, dist.get_rank(group), world), group=group)
    return next((one for one in found if one is not None), None)


def require_intact(path: Path, group: dist.ProcessGroup | None = None) -> None:
    """Check a checkpoint that was asked for by name; all ranks of the group together.

    Raises:
        UserError: it is damaged.
    """
    damage = agreed_problem(path, group)
    if damage is not None:
        raise UserError(f"The checkpoint {path} is damaged: {damage}. Name an older one, or another copy of it.")


def _read_sums(path: Path) -> dict[str, FileSum]:
    return parse_sums((path / SUMS).read_text(encoding="utf-8"))


def problem_of_file(path: Path, expected: FileSum) -> str | None:
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
    for name, end in sorted(extents(path).items()):
        file = path / name
        if not file.exists():
            return f"{name} is missing"
        if file.stat().st_size < end:
            return f"{name} has {file.stat().st_size:,} bytes instead of {end:,}"
    return None
