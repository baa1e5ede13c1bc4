"""Latent store reader: the samples of a split, through memory maps."""

import json
from bisect import bisect_right
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.paths.latent_store_manifest import LatentManifest
from titan_exp.data.latent_batch import LatentBatch
from titan_exp.ops.attention.axial_rope import grid_positions

ARRAYS = ("latents", "text", "pooled")
"""Arrays of every shard."""
DEVIATIONS = "deviations"
"""Array of shards of an encoder with a posterior: its standard deviations; `latents` are its means."""
_MAX_MAPPED_SHARDS = 256


class Sample(NamedTuple):
    """One sample, in fp32."""

    latents: np.ndarray
    """Latents [image, channels]."""
    text: np.ndarray
    """States of the text [text, text_dim]."""
    pooled: np.ndarray
    """Pooled embedding of the text [pooled_dim]."""
    deviations: np.ndarray | None = None
    """Standard deviations of the posterior [image, channels], if the encoder has one."""


class LatentSplit:
    """Samples of a split by number."""

    def __init__(self, manifest: LatentManifest, split: str) -> None:
        self.manifest = manifest
        self._shards = manifest.splits[split]
        self._kinds = (*ARRAYS, DEVIATIONS) if manifest.latents.get("posterior") else ARRAYS
        self._offsets: list[int] = np.cumsum([0, *(shard.samples for shard in self._shards)]).tolist()
        self._map = lru_cache(maxsize=_MAX_MAPPED_SHARDS)(self._open)
        empty = [_load(manifest, f"empty.{kind}") for kind in ("text", "pooled")]
        self._empty = [torch.from_numpy(np.array(array, dtype=np.float32)) for array in empty]
        self._positions = [grid_positions(manifest.text_tokens, shard.rows, shard.columns) for shard in self._shards]

    def __len__(self) -> int:
        return self._offsets[-1]

    def __getitem__(self, index: int) -> Sample:
        number = self._shard_of(index)
        return Sample(*(array[index - self._offsets[number]].astype(np.float32) for array in self._map(number)))

    def captions(self) -> list[str]:
        """Texts of all samples."""
        files = (self.manifest.path / f"{shard.name}.captions.json" for shard in self._shards)
        return [caption for file in files for caption in json.loads(file.read_text(encoding="utf-8"))]

    def batch(self, indices: list[int], samples: list[int], weights: list[float]) -> LatentBatch:
        """Batch of samples by index in the split, with their numbers in the run and their weights."""
        found = [self[index] for index in indices]
        stacked = {
            kind: torch.from_numpy(np.stack([getattr(sample, kind) for sample in found])) for kind in self._kinds
        }
        return LatentBatch(
            **stacked,
            empty_text=self._empty[0][None],
            empty_pooled=self._empty[1][None],
            positions=torch.cat([self._positions[self._shard_of(index)] for index in indices]),
            samples=torch.tensor(samples),
            weights=torch.tensor(weights),
        )

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
