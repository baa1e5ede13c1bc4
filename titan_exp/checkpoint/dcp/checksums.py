"""Checksums of a checkpoint: `checksums.json` lists size and CRC-32 of every file.

CRC-32 detects every burst of up to 32 flipped bits and misses other damage once in 2^32; it does not protect against
tampering.
"""

import json
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from titan_exp.checkpoint.dcp.storage_reader import damaged_checkpoint, min_file_sizes
from titan_exp.config.paths.checkpoint_files import CHECKSUMS_FILE, FileChecksum, parse_checksums
from titan_exp.config.paths.checkpoint_paths import METADATA_FILE
from titan_exp.config.paths.foreign_file import read_file
from titan_exp.tracking.run_folder.atomic_write import write_atomically

_CHUNK_BYTES = 8 * 2**20
_THREADS = 4


def write_checksums(path: Path, checksums: Mapping[str, FileChecksum]) -> None:
    """Write `checksums.json` into a checkpoint."""
    files = {name: {"size": entry.size, "crc32": f"{entry.crc32:08x}"} for name, entry in sorted(checksums.items())}
    write_atomically(path / CHECKSUMS_FILE, json.dumps({"files": files}, indent=1) + "\n")


def has_checksums(path: Path) -> bool:
    """True if a checkpoint has checksums; early versions wrote none."""
    return (path / CHECKSUMS_FILE).exists()


def find_damage(path: Path, shard: int = 0, shards: int = 1) -> str | None:
    """Verify a checkpoint's files; returns a description of the first damaged file, or None.

    Only files with index `shard` modulo `shards` are read, so that ranks can read different files.
    """
    try:
        if not has_checksums(path):
            if any(has_checksums(neighbour) for neighbour in path.parent.glob("step-*")):
                return f"{CHECKSUMS_FILE} is missing, which other checkpoints beside it have"
            return _find_short_file(path) if shard == 0 else None
        checksums = parse_checksums(read_file(path / CHECKSUMS_FILE))
    except Exception as error:  # damaged bytes break JSON and pickles in any way
        return f"its metadata cannot be read ({type(error).__name__}: {error})"
    if METADATA_FILE not in checksums:
        return f"{CHECKSUMS_FILE} does not list {METADATA_FILE}"
    names = sorted(checksums)[shard::shards]
    with ThreadPoolExecutor(_THREADS) as threads:
        found = threads.map(lambda name: find_file_damage(path / name, checksums[name]), names)
        return next((damage for damage in found if damage is not None), None)


def find_damage_on_ranks(path: Path, group: dist.ProcessGroup | None) -> str | None:
    """`find_damage` with the files sharded over the ranks of the group; without a group, by this process alone."""
    if not dist.is_initialized():
        return find_damage(path)
    world = dist.get_world_size(group)
    found: list[str | None] = [None] * world
    dist.all_gather_object(found, find_damage(path, dist.get_rank(group), world), group=group)
    return next((damage for damage in found if damage is not None), None)


def require_intact(path: Path, group: dist.ProcessGroup | None = None) -> None:
    """Verify a checkpoint given by the user; collective over the group. Raises UserError if it is damaged."""
    raise_if_damaged(path, find_damage_on_ranks(path, group))


def raise_if_damaged(path: Path, damage: str | None) -> None:
    """Raise UserError if `damage` is not None."""
    if damage is not None:
        raise damaged_checkpoint(path, damage)


def find_file_damage(path: Path, expected: FileChecksum) -> str | None:
    """Verify one file; returns a description of the damage, or None."""
    try:
        size = path.stat().st_size
        if size != expected.size:
            return f"{path.name} has {size:,} bytes instead of {expected.size:,}"
        return None if _crc32(path) == expected.crc32 else f"{path.name} does not match its checksum"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror or error})"


def _crc32(path: Path) -> int:
    crc, buffer = 0, memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
    return crc


def _find_short_file(path: Path) -> str | None:
    """Find a file shorter than its extents in the metadata, for checkpoints without checksums."""
    for name, end in sorted(min_file_sizes(path).items()):
        file = path / name
        if not file.exists():
            return f"{name} is missing"
        if file.stat().st_size < end:
            return f"{name} has {file.stat().st_size:,} bytes instead of {end:,}"
    return None
