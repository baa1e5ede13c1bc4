"""Latent store reader: the samples of a split, through memory maps."""

import json
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.paths.latent_store_manifest import LatentManifest
from titan_exp.data.latent_store.samples import LatentSamples, Sample

ARRAYS = ("latents", "text", "pooled")
"""Arrays of every shard."""
DEVIATIONS = "deviations"
"""Array of shards of an encoder with a posterior: its standard deviations; `latents` are its means."""
_MAX_MAPPED_SHARDS = 256


class LatentSplit(LatentSamples):
    """Samples of a split of a store."""

    def __init__(self, manifest: LatentManifest, split: str) -> None:
        super().__init__((_load(manifest, "empty.text"), _load(manifest, "empty.pooled")))
        self.manifest = manifest
        self._shards = manifest.splits[split]
        self._kinds = (*ARRAYS, DEVIATIONS) if manifest.latents.get("posterior") else ARRAYS
        self._offsets: list[int] = np.cumsum([0, *(shard.samples for shard in self._shards)]).tolist()
        self._map = lru_cache(maxsize=_MAX_MAPPED_SHARDS)(self._open)

    def __len__(self) -> int:
        return self._offsets[-1]

    def read(self, indices: Sequence[int]) -> list[Sample]:
        """Samples by index."""
        places = [(number := self._shard_of(index), index - self._offsets[number]) for index in indices]
        return [Sample(*(array[row].astype(np.float32) for array in self._map(number))) for number, row in places]

    def captions(self) -> list[str]:
        """Texts of all samples."""
        files = (self.manifest.path / f"{shard.name}.captions.json" for shard in self._shards)
        return [caption for file in files for caption in json.loads(file.read_text(encoding="utf-8"))]

    def shape(self, index: int) -> tuple[int, int]:
        """Rows and columns of a sample's image tokens."""
        shard = self._shards[self._shard_of(index)]
        return shard.rows, shard.columns

    def _shard_of(self, index: int) -> int:
        return bisect_right(self._offsets, index) - 1

    def _open(self, number: int) -> list[np.ndarray]:
        return [_load(self.manifest, f"{self._shards[number].name}.{kind}") for kind in self._kinds]


def _load(manifest: LatentManifest, name: str) -> np.ndarray:
    path = manifest.path / f"{name}.npy"
    try:
        return np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        violation = Violation("data.paths", str(manifest.path), f"{path.name}: {error}", "copy or encode it again")
        raise UserError("The latent store is damaged.", [violation]) from error
