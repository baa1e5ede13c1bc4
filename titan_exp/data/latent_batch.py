"""Micro-batches of latents with the states of their texts, for diffusion."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from titan_exp.data.batch import Inputs, MicroBatch, SequencePart


@dataclass(frozen=True)
class LatentBatch(MicroBatch):
    """Rows of samples; tensors are fp32 but for `positions` and `samples`."""

    latents: Tensor
    """Data [rows, image, channels]."""
    text: Tensor
    """States of the texts [rows, text, text_dim]."""
    pooled: Tensor
    """Pooled embeddings of the texts [rows, pooled_dim]."""
    empty_text: Tensor
    """States of the empty text [1, text, text_dim]."""
    empty_pooled: Tensor
    """Pooled embedding of the empty text [1, pooled_dim]."""
    positions: Tensor
    """Positions of text and image tokens [rows, text + image, 3], int64; see `grid_positions`."""
    samples: Tensor
    """Number of each sample in the run [rows], int64, which random numbers are keyed by."""
    weights: Tensor
    """1 for samples, 0 for rows that fill the batch up [rows]."""
    noise: Tensor | None = None
    """Noise [rows, image, channels]; None until the objective draws it, and in sampling, where `latents` are noisy."""
    times: Tensor | None = None
    """Times [rows]; None until the objective draws them."""
    guidance: Tensor | None = None
    """Guidance scales [rows] for a model that reads one, which the objective draws; None for another."""
    deviations: Tensor | None = None
    """Standard deviations of the latents' posterior [rows, image, channels], whose means are `latents`, until the
    objective draws from it; None for latents without a posterior."""

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the batch."""
        values = (getattr(self, field.name) for field in fields(self))
        return [value for value in values if value is not None]

    def map(self, function: Callable[[Tensor], Tensor]) -> "LatentBatch":
        """Apply a function to every tensor of the batch."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        mapped: dict[str, Any] = {name: value if value is None else function(value) for name, value in values.items()}
        return LatentBatch(**mapped)

    def inputs(self, hidden: Tensor | None = None) -> Inputs:
        """Noisy latents at their times, or hidden states, and their conditions."""
        assert self.times is not None, "drawn by the objective's `prepare`"
        noisy, times = self.latents, self.times[:, None, None]
        if self.noise is not None:
            noisy = (1 - times) * self.latents + times * self.noise
        named = {"pooled": self.pooled, "times": self.times, "positions": self.positions, "guidance": self.guidance}
        return Inputs((noisy if hidden is None else hidden, self.text), named)

    def sharded(self, part: SequencePart) -> "LatentBatch":
        """This rank's part of the text tokens and of the image tokens."""
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
