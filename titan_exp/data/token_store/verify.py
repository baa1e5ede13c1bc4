"""Reading all of a store and comparing it with its checksums."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from titan_exp.config.paths.token_store_manifest import Manifest
from titan_exp.data.token_store.shard_writer import checksum

_BLOCK = 1 << 22


def find_damage(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Every file of the store that is not as it was written, and what is wrong with it; all of them are read."""
    missing = dict(manifest.damaged())
    yield from missing.items()
    expected = dict(manifest.files)
    for shards in manifest.splits.values():
        for shard in shards:
            expected |= {f"{shard.name}.{ending}": value for ending, value in shard.checksums.items()}
    whole = [name for name in expected if name not in missing]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, found in zip(whole, pool.map(lambda name: _digest(manifest.path / name), whole), strict=True):
            if found != expected[name]:
                yield name, "its content has changed"


def _digest(path: Path) -> str:
    digest = checksum()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
