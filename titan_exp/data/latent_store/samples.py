"""Samples of a split by number, from a store or encoded on demand, and batches of them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch

from titan_exp.data.latent_batch import LatentBatch
from titan_exp.ops.attention.axial_rope import grid_positions


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


class LatentSamples(ABC):
    """Samples of a split by number; `empty` is the states and the pooled embedding of the empty text."""

    def __init__(self, empty: tuple[np.ndarray, np.ndarray]) -> None:
        self._empty = [torch.from_numpy(array.astype(np.float32))[None] for array in empty]
        self._positions = lru_cache(maxsize=64)(partial(grid_positions, len(empty[0])))

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @abstractmethod
    def read(self, indices: Sequence[int]) -> list[Sample]:
        """Samples by index."""

    @abstractmethod
    def captions(self) -> list[str]:
        """Texts of all samples."""

    @abstractmethod
    def shape(self, index: int) -> tuple[int, int]:
        """Rows and columns of a sample's image tokens."""

    def __getitem__(self, index: int) -> Sample:
        """Sample by index."""
        return self.read([index])[0]

    def batch(self, indices: list[int], samples: list[int], weights: list[float]) -> LatentBatch:
        """Batch of samples by index in the split, with their numbers in the run and their weights."""
        found = dict(zip(Sample._fields, zip(*self.read(indices), strict=True), strict=True))
        stacked = {kind: torch.from_numpy(np.stack(arrays)) for kind, arrays in found.items() if arrays[0] is not None}
        return LatentBatch(
            **stacked,
            empty_text=self._empty[0],
            empty_pooled=self._empty[1],
            positions=torch.cat([self._positions(*self.shape(index)) for index in indices]),
            samples=torch.tensor(samples),
            weights=torch.tensor(weights),
        )
