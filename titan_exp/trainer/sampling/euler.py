"""Euler sampler of rectified flow, from noise at time 1 to data at 0, with classifier-free guidance (Ho and Salimans
2022)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from titan_exp.data.keyed_random import keyed_generator
from titan_exp.data.latent_batch import LatentBatch
from titan_exp.data.latent_store.text_encoder import TextEncoder
from titan_exp.ops.attention.axial_rope import grid_positions
from titan_exp.trainer.objective.rectified_flow import shifted

Velocity = Callable[[Tensor, float], Tensor]
"""Velocity [rows, image, channels] of noisy latents at a time."""
Outputs = Callable[[LatentBatch], Tensor]
"""Outputs of a model in fp32 for whole rows, as `Model.outputs`."""


@dataclass(frozen=True)
class Conditions:
    """Inputs of a model beside noisy latents and their time; tensors are on its device."""

    text: Tensor
    """States of the texts [rows, text, text_dim]."""
    pooled: Tensor
    """Pooled embeddings of the texts [rows, pooled_dim]."""
    positions: Tensor
    """Positions of text and image tokens [1, text + image, 3]."""
    guidance: float | None = None
    """Guidance scale that the model reads; None for a model that reads none."""

    def to(self, device: torch.device) -> "Conditions":
        """The same on a device."""
        text, pooled, positions = self.text.to(device), self.pooled.to(device), self.positions.to(device)
        return Conditions(text, pooled, positions, self.guidance)


def conditions(
    encoder: TextEncoder, prompts: Sequence[str], rows: int, columns: int, guidance: float | None = None
) -> Conditions:
    """Conditions of prompts for images of `rows` by `columns` tokens."""
    states, pooled = (torch.from_numpy(np.stack(arrays)) for arrays in zip(*map(encoder, prompts), strict=True))
    return Conditions(states, pooled, grid_positions(encoder.tokens, rows, columns), guidance)


def velocity(outputs: Outputs, given: Conditions) -> Velocity:
    """Velocity that a model predicts, in fp32."""

    def predict(noisy: Tensor, time: float) -> Tensor:
        rows, device = len(noisy), noisy.device
        batch = LatentBatch(
            latents=noisy,
            text=given.text,
            pooled=given.pooled,
            empty_text=given.text,
            empty_pooled=given.pooled,
            positions=given.positions.expand(rows, -1, -1),
            samples=torch.arange(rows, device=device),
            weights=torch.ones(rows, device=device),
            times=torch.full((rows,), time, device=device),
            guidance=None if given.guidance is None else torch.full((rows,), given.guidance, device=device),
        )
        return outputs(batch)

    return predict


def guided_velocity(outputs: Outputs, given: Conditions, empty: Conditions, scale: float) -> Velocity:
    """Velocity v_u + scale · (v_c - v_u), with v_u for the conditions of the `empty` text; with scale 1 it is v_c."""
    if scale == 1:
        return velocity(outputs, given)
    rows = len(given.text)
    both = replace(
        given,
        text=torch.cat((given.text, empty.text.expand(rows, -1, -1))),
        pooled=torch.cat((given.pooled, empty.pooled.expand(rows, -1))),
    )
    predict_both = velocity(outputs, both)

    def predict(noisy: Tensor, time: float) -> Tensor:
        conditional, unconditional = predict_both(torch.cat((noisy, noisy)), time).chunk(2)
        return unconditional + scale * (conditional - unconditional)

    return predict


def sampling_times(steps: int, image_tokens: int, *, shift: bool) -> list[float]:
    """Times of `steps` steps, from 1 to 0, shifted towards noise by the number of image tokens with `shift`."""
    times = [1 - step / steps for step in range(steps)]
    return [*(shifted(time, image_tokens) if shift else time for time in times), 0.0]


@torch.no_grad()
def euler(predict: Velocity, noise: Tensor, times: Sequence[float]) -> Tensor:
    """Latents [rows, image, channels] after a step between each two times, from noise at the first."""
    latents = noise
    for time, after in pairwise(times):
        latents = latents + (after - time) * predict(latents, time)
    return latents


def sampling_noise(seed: int, samples: Sequence[int], image_tokens: int, channels: int) -> Tensor:
    """Noise [samples, image tokens, channels] in fp32, keyed by seed and number of the sample."""
    shape = (image_tokens, channels)
    arrays = [keyed_generator(seed, number, "sampling noise").standard_normal(shape, np.float32) for number in samples]
    return torch.from_numpy(np.stack(arrays))
