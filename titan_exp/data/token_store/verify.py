"""Checksum verification of a token store."""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from titan_exp.config.paths.token_store_manifest import Manifest
from titan_exp.data.token_store.shard_writer import checksum


def find_damage(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Damaged files of a store and their problems; reads the whole store."""
    missing = dict(manifest.damaged())
    yield from missing.items()
    expected = dict(manifest.files)
    for shards in manifest.splits.values():
        for shard in shards:
            expected |= {f"{shard.name}.{suffix}": value for suffix, value in shard.checksums.items()}
    present = [name for name in expected if name not in missing]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, found in zip(
            present, pool.map(lambda name: file_checksum(manifest.path / name), present), strict=True
        ):
            if found != expected[name]:
                yield name, "its content has changed"


def file_checksum(path: Path) -> str:
    """Checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, checksum).hexdigest()
