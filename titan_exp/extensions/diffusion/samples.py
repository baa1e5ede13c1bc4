"""Samples of a split by number, from a store or encoded on demand, and their micro-batches."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from titan_exp.data.batch import Inputs, MicroBatch, SequencePart, keyed_generator
from titan_exp.extensions.diffusion.encoders import Encoders
from titan_exp.extensions.diffusion.images import Bucket, CaptionedImages
from titan_exp.extensions.diffusion.latent_format import in_keys_of_data


@dataclass(frozen=True)
class LatentBatch(MicroBatch):
    """Micro-batch of samples; tensors are fp32 except `positions` and `samples`."""

    latents: Tensor  # data [rows, image, channels]
    text: Tensor  # states of the texts [rows, text, text_dim]
    pooled: Tensor  # pooled embeddings of the texts [rows, pooled_dim]
    empty_text: Tensor  # states of the empty text [1, text, text_dim]
    empty_pooled: Tensor  # pooled embedding of the empty text [1, pooled_dim]
    positions: Tensor  # positions of text and image tokens [rows, text + image, 3], int64; see `grid_positions`
    samples: Tensor  # number of each sample in the run [rows], int64, by which random numbers are keyed
    weights: Tensor  # 1 for samples, 0 for rows that pad the batch [rows]
    noise: Tensor | None = None
    """Noise [rows, image, channels]. None until the objective draws it, and in sampling, where `latents` are already
    noisy."""
    times: Tensor | None = None  # times [rows]; None until the objective draws them
    guidance: Tensor | None = None
    """Guidance scales [rows] for a model that reads one, drawn by the objective; None for other models."""
    deviations: Tensor | None = None
    """Standard deviations of the latents' posterior [rows, image, channels], whose means are `latents`, until the
    objective draws from it. None for latents without a posterior."""

    @property
    def tensors(self) -> list[Tensor]:
        return [value for value in vars(self).values() if value is not None]

    def map(self, function: Callable[[Tensor], Tensor]) -> "LatentBatch":
        mapped: Any = {name: value if value is None else function(value) for name, value in vars(self).items()}
        return LatentBatch(**mapped)

    def inputs(self, hidden: Tensor | None = None) -> Inputs:
        assert self.times is not None, "drawn by the objective's `prepare`"
        noisy, times = self.latents, self.times[:, None, None]
        if self.noise is not None:
            noisy = (1 - times) * self.latents + times * self.noise
        named = {"pooled": self.pooled, "times": self.times, "positions": self.positions, "guidance": self.guidance}
        return Inputs((noisy if hidden is None else hidden, self.text), named)

    def sharded(self, part: SequencePart) -> "LatentBatch":
        length = self.text.shape[1]
        positions = [part.take(tokens) for tokens in (self.positions[:, :length], self.positions[:, length:])]
        return replace(
            self,
            latents=part.take(self.latents),
            text=part.take(self.text),
            empty_text=part.take(self.empty_text),
            positions=torch.cat(positions, dim=1),
            noise=None if self.noise is None else part.take(self.noise),
            deviations=None if self.deviations is None else part.take(self.deviations),
        )


class Sample(NamedTuple):
    """One sample, in fp32; see `LatentBatch`."""

    latents: np.ndarray
    text: np.ndarray
    pooled: np.ndarray
    deviations: np.ndarray | None = None


class LatentSamples(ABC):
    """Samples of a split by number; `empty` holds the states and the pooled embedding of the empty text."""

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
        return self.read([index])[0]

    def batch(self, indices: list[int], samples: list[int], weights: list[float]) -> LatentBatch:
        """Make a batch of samples by index in the split, with their numbers in the run and their weights."""
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


KEPT_BYTES = 2**28  # maximum size, in bytes, of the samples that a split keeps


class EncodedImages(LatentSamples):
    """Samples of a split, encoded on demand. `groups` has the indices of its images by bucket; with `keep`, encoded
    samples stay in memory."""

    def __init__(
        self,
        images: CaptionedImages,
        encoders: Encoders,
        groups: Sequence[tuple[Bucket, Sequence[int]]],
        *,
        keep: bool = False,
    ) -> None:
        super().__init__(encoders.texts(""))
        self._images, self._encoders = images, encoders
        self._places = [(bucket, index) for bucket, indices in groups for index in indices]
        self._kept, self._room = dict[int, Sample](), KEPT_BYTES if keep else 0

    def __len__(self) -> int:
        return len(self._places)

    def read(self, indices: Sequence[int]) -> list[Sample]:
        """Samples by index; samples of one bucket are encoded together."""
        found = {index: self._kept[index] for index in indices if index in self._kept}
        missing = [index for index in dict.fromkeys(indices) if index not in found]
        for bucket in dict.fromkeys(self._places[index][0] for index in missing):
            group = [index for index in missing if self._places[index][0] == bucket]
            with in_keys_of_data():
                arrays = self._encoders.encode(self._images, [self._places[index][1] for index in group], bucket)
            found |= {index: Sample(*rows) for index, rows in zip(group, zip(*arrays, strict=True), strict=True)}
        for index in missing:
            size = sum(array.nbytes for array in found[index] if array is not None)
            if size <= self._room:
                copies: list[Any] = [None if array is None else np.array(array) for array in found[index]]
                self._kept[index] = Sample(*copies)
                self._room -= size
        return [found[index] for index in indices]

    def captions(self) -> list[str]:
        return [self._images.caption(index) for _, index in self._places]

    def shape(self, index: int) -> tuple[int, int]:
        bucket, _ = self._places[index]
        return bucket.rows, bucket.columns


def noise_of(batch: LatentBatch, seed: int, purpose: str) -> torch.Tensor:
    """Noise for each sample of a CPU batch [rows, image, channels], fp32."""
    generators = (keyed_generator(seed, sample, purpose) for sample in batch.samples.tolist())
    drawn = [random.standard_normal(batch.latents.shape[1:], dtype=np.float32) for random in generators]
    return torch.from_numpy(np.stack(drawn))


def grid_positions(text_tokens: int, rows: int, columns: int) -> Tensor:
    """Positions [1, seq, 3] of text tokens, all zero, then those of image patches (0, row, column) in reading order."""
    image = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), dim=-1).flatten(0, 1)
    positions = torch.zeros(1, text_tokens + rows * columns, 3, dtype=torch.int64)
    positions[0, text_tokens:, 1:] = image
    return positions
