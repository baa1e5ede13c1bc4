"""Rectified flow (Liu et al. 2022; Esser et al. 2024): squared error of the velocity between data and noise. Also its
Euler sampler, from noise at time 1 to data at time 0, with classifier-free guidance (Ho and Salimans 2022).

x_t = (1 - t) · x + t · ε for data x and noise ε; the target is ε - x. The loss is the mean over all elements of the
latents of the global batch. All random numbers are keyed by seed, sample and purpose.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.schema.typed_config import typed_options
from titan_exp.data.batch import keyed_generator
from titan_exp.extensions.diffusion.config import RectifiedFlowOptions
from titan_exp.extensions.diffusion.encoders import TextEncoder
from titan_exp.extensions.diffusion.samples import LatentBatch, grid_positions, noise_of
from titan_exp.extensions.diffusion.spec import latent_inputs
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.ops.cross_entropy import VocabShard
from titan_exp.trainer.objective import Loss, Reduction

MODE_SCALE = 1.29  # scale s of SD3's distribution with a mode
SHIFTS = ((256, 0.5), (4096, 1.15))  # numbers of image tokens with their shift μ; Flux's shift is linear between them


def velocity_errors(velocity: Tensor, latents: Tensor, noise: Tensor) -> Tensor:
    """Squared error of each sample's velocity, in fp32; arguments are [rows, image, channels]."""
    return (velocity.float() - (noise - latents)).square().sum(dim=(1, 2))


@dataclass(frozen=True)
class RectifiedFlow:
    """Rectified flow objective for models of latents.

    A batch that already has times, as in evaluation, keeps its noise, times and texts."""

    options: RectifiedFlowOptions = field(default_factory=RectifiedFlowOptions)  # times, dropout and guidance
    guided: bool = False  # True if the model reads a guidance scale
    errors: Callable[[Tensor, Tensor, Tensor], Tensor] = velocity_errors  # squared errors by sample, compiled or eager
    has_perplexity = False

    @classmethod
    def build(
        cls,
        config: TrainingConfig,
        vocab_shard: VocabShard | None = None,
        *,
        compile_backend: str | None = None,
        **options: Any,
    ) -> Self:
        """Build from the training group and its `objective_options`."""
        objective = cls(typed_options(RectifiedFlowOptions, options, "training.objective_options"))
        if compile_backend is None:
            return objective
        compiled = torch.compile(velocity_errors, backend=compile_backend, fullgraph=True, dynamic=False)
        return replace(objective, errors=compiled)

    def bind(self, spec: ModelSpec) -> Self:
        """Return the objective for a model; it is guided if the model reads a guidance scale."""
        latents = latent_inputs(spec)
        return self if latents is None else replace(self, guided=latents.guidance)

    @property
    def metrics(self) -> Mapping[str, Reduction]:
        """No metrics beside the loss."""
        return {}

    def count(self, batch: LatentBatch) -> int:
        """Number of text and image tokens, by which speed and FLOPs are counted."""
        return int(batch.weights.sum()) * _tokens(batch)

    def prepare(self, batch: LatentBatch, seed: int) -> LatentBatch:
        """Draw noise, times and dropped texts for a CPU batch."""
        samples = batch.samples.tolist()
        dropped = {
            name: torch.tensor(
                [keyed_generator(seed, sample, f"{name} dropout").random() < share for sample in samples]
            )
            for name, share in (("text", self.options.text_dropout), ("pooled", self.options.pooled_dropout))
        }
        times = [self.time(seed, sample, batch.latents.shape[1]) for sample in samples]
        guidance = [keyed_generator(seed, sample, "guidance").uniform(*self.options.guidance) for sample in samples]
        latents = batch.latents
        if batch.deviations is not None:
            latents = latents + batch.deviations * noise_of(batch, seed, "posterior")
        return replace(
            batch,
            latents=latents,
            deviations=None,
            noise=noise_of(batch, seed, "noise"),
            times=torch.tensor(times, dtype=torch.float32),
            guidance=torch.tensor(guidance, dtype=torch.float32) if self.guided else None,
            text=torch.where(dropped["text"][:, None, None], batch.empty_text, batch.text),
            pooled=torch.where(dropped["pooled"][:, None], batch.empty_pooled, batch.pooled),
        )

    def prepare_evaluation(self, batch: LatentBatch) -> LatentBatch:
        """Give an evaluation batch, which has times and noise, the mean guidance if the model reads one."""
        if not self.guided:
            return batch
        return replace(batch, guidance=torch.full_like(batch.weights, sum(self.options.guidance) / 2))

    def time(self, seed: int, sample: int, image_tokens: int) -> float:
        """Time of a sample, between 0 (data) and 1 (noise)."""
        random = keyed_generator(seed, sample, "time")
        match self.options.times:
            case "uniform":
                time = random.random()
            case "logit_normal":
                time = 1 / (1 + math.exp(-random.standard_normal()))
            case "mode":
                u = random.random()
                time = 1 - u - MODE_SCALE * (math.cos(math.pi * u / 2) ** 2 - 1 + u)
        return shifted(time, image_tokens) if self.options.shift else time

    def __call__(self, model: nn.Module, batch: LatentBatch, hidden: Tensor | None = None) -> Loss:
        """Compute the loss of a batch, on the last pipeline stage from its `hidden` states."""
        inputs = batch.inputs(hidden)
        velocity = model(*inputs.positional, **inputs.named)
        assert batch.noise is not None, "drawn by `prepare`"
        error = self.errors(velocity, batch.latents, batch.noise)
        # Divided by the tokens of the global batch, this is the mean over the elements of its latents.
        total = (error * batch.weights).sum() * (_tokens(batch) / batch.latents[0].numel())
        return Loss(total, {"loss": total.detach()})


def _tokens(batch: LatentBatch) -> int:
    return batch.text.shape[1] + batch.latents.shape[1]


def shifted(time: float, image_tokens: int) -> float:
    """Shift a time towards noise: e^μ / (e^μ + 1/t - 1), where μ depends on the number of image tokens."""
    (few, low), (many, high) = SHIFTS
    factor = math.exp(low + (high - low) * (image_tokens - few) / (many - few))
    return factor * time / (1 + (factor - 1) * time)


Velocity = Callable[[Tensor, float], Tensor]  # predicts the velocity [rows, image, channels] of noisy latents at a time
Outputs = Callable[[LatentBatch], Tensor]  # computes a model's outputs in fp32 for whole rows, like `Model.outputs`


@dataclass(frozen=True)
class Conditions:
    """Inputs of a model beside noisy latents and their time, as in `LatentBatch`; tensors are on its device."""

    text: Tensor
    pooled: Tensor
    positions: Tensor  # positions of text and image tokens [1, text + image, 3]
    guidance: float | None = None

    def to(self, device: torch.device) -> "Conditions":
        """Move the conditions to a device."""
        text, pooled, positions = self.text.to(device), self.pooled.to(device), self.positions.to(device)
        return Conditions(text, pooled, positions, self.guidance)


def conditions(
    encoder: TextEncoder, prompts: Sequence[str], rows: int, columns: int, guidance: float | None = None
) -> Conditions:
    """Conditions of prompts for images of `rows` by `columns` tokens."""
    states, pooled = (torch.from_numpy(np.stack(arrays)) for arrays in zip(*map(encoder, prompts), strict=True))
    return Conditions(states, pooled, grid_positions(encoder.tokens, rows, columns), guidance)


def velocity(outputs: Outputs, given: Conditions) -> Velocity:
    """Function that predicts the velocity by a model, in fp32."""

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
    """Function for the velocity v_u + scale · (v_c - v_u), where v_u is under the conditions of the `empty` text; with
    scale 1 it is v_c."""
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
    """Times of `steps` steps, from 1 to 0; with `shift`, shifted towards noise by the number of image tokens."""
    times = [1 - step / steps for step in range(steps)]
    return [*(shifted(time, image_tokens) if shift else time for time in times), 0.0]


@torch.no_grad()
def euler(predict: Velocity, noise: Tensor, times: Sequence[float]) -> Tensor:
    """Integrate from noise at the first time, one Euler step to each next time; returns latents [rows, image,
    channels]."""
    latents = noise
    for time, after in pairwise(times):
        latents = latents + (after - time) * predict(latents, time)
    return latents


def sampling_noise(seed: int, samples: Sequence[int], image_tokens: int, channels: int) -> Tensor:
    """Noise [samples, image tokens, channels] in fp32, keyed by seed and sample number."""
    shape = (image_tokens, channels)
    arrays = [keyed_generator(seed, number, "sampling noise").standard_normal(shape, np.float32) for number in samples]
    return torch.from_numpy(np.stack(arrays))
