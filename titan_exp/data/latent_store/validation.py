"""Validation of diffusion: every held-out sample at fixed times, with noise of its own that never changes.

Loss at fixed times correlates with image quality (Esser et al. 2024), and is the same number in every layout.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.data import DataConfig
from titan_exp.data.keyed_random import keyed_generator
from titan_exp.data.latent_batch import LatentBatch
from titan_exp.data.latent_store.latent_data import open_latents
from titan_exp.data.latent_store.samples import LatentSamples

TIMES = tuple((index + 0.5) / 8 for index in range(8))
"""Times of evaluation."""
_SEED = 0


@dataclass(frozen=True)
class FixedTimeBatches:
    """Batches of one data rank at one time; every rank has as many, and each sample is on exactly one."""

    split: LatentSamples
    samples: int
    time: float
    dp_rank: int
    dp_degree: int
    micro_batch_size: int

    def __len__(self) -> int:
        return math.ceil(self.samples / (self.micro_batch_size * self.dp_degree))

    def __iter__(self) -> Iterator[LatentBatch]:
        for number in range(len(self)):
            first = number * self.micro_batch_size
            rows = [self.dp_rank + row * self.dp_degree for row in range(first, first + self.micro_batch_size)]
            batch = self.split.batch(
                [row % self.samples for row in rows], rows, [float(r < self.samples) for r in rows]
            )
            yield replace(
                batch, noise=noise_of(batch, _SEED, "validation noise"), times=torch.full((len(rows),), self.time)
            )


@dataclass(frozen=True)
class WithoutText:
    """The same batches with the empty text."""

    batches: FixedTimeBatches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[LatentBatch]:
        for batch in self.batches:
            yield replace(
                batch,
                text=batch.empty_text.expand_as(batch.text).contiguous(),
                pooled=batch.empty_pooled.expand_as(batch.pooled).contiguous(),
            )


def noise_of(batch: LatentBatch, seed: int, purpose: str) -> torch.Tensor:
    """Noise of each sample of a CPU batch [rows, image, channels], fp32."""
    shape = batch.latents.shape[1:]
    return torch.from_numpy(
        np.stack(
            [
                keyed_generator(seed, sample, purpose).standard_normal(shape, dtype=np.float32)
                for sample in batch.samples.tolist()
            ]
        )
    )


def validation_batches(
    data: DataConfig, *, dp_rank: int, dp_degree: int, micro_batch_size: int, all_documents: bool
) -> dict[str, FixedTimeBatches]:
    """Batches by time. With `all_documents` the samples are those of the training split.

    Raises:
        UserError: there are no validation samples.
    """
    split = open_latents(data).splits["train" if all_documents else "validation"]
    samples = min(len(split), data.validation_documents or len(split))
    if not samples:
        raise UserError("There is nothing to evaluate on.", [_none_held_out(data)])
    return {
        f"t={time:g}": FixedTimeBatches(split, samples, time, dp_rank, dp_degree, micro_batch_size) for time in TIMES
    }


def _none_held_out(data: DataConfig) -> Violation:
    if data.source == "images":
        reason, remedy = "no image is held out", "a larger data.validation_fraction, or training.evaluate_every=0"
        return Violation("data.validation_fraction", data.validation_fraction, reason, remedy)
    reason = "this store was made without validation samples"
    return Violation("data.paths", data.paths[0], reason, "training.evaluate_every=0, or another store")
