"""Rectified flow (Liu et al. 2022; Esser et al. 2024): squared error of the velocity between data and noise.

x_t = (1 - t) · x + t · ε for data x and noise ε; the target is ε - x. The loss is the mean over all elements of the
latents of the global batch. All random numbers are keyed by seed, sample and purpose.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.objectives.rectified_flow import RectifiedFlowOptions
from titan_exp.config.schema.typed_options import typed_options
from titan_exp.data.keyed_random import keyed_generator
from titan_exp.data.latent_batch import LatentBatch
from titan_exp.data.latent_store.validation import noise_of
from titan_exp.ops.loss.cross_entropy import VocabShard
from titan_exp.trainer.objective.base import Loss, Reduction

MODE_SCALE = 1.29
"""Scale s of SD3's distribution with a mode."""
SHIFTS = ((256, 0.5), (4096, 1.15))
"""Image tokens and their shift μ, between which Flux's is linear."""


def velocity_errors(velocity: Tensor, latents: Tensor, noise: Tensor) -> Tensor:
    """Squared error of each sample's velocity, in fp32; arguments are [rows, image, channels]."""
    return (velocity.float() - (noise - latents)).square().sum(dim=(1, 2))


@dataclass(frozen=True)
class RectifiedFlow:
    """The objective; a batch that has times, as in evaluation, keeps its noise, times and texts."""

    options: RectifiedFlowOptions = field(default_factory=RectifiedFlowOptions)
    """Times, dropout and guidance."""
    guided: bool = False
    """True if the model reads a guidance scale."""
    errors: Callable[[Tensor, Tensor, Tensor], Tensor] = velocity_errors
    """Squared errors by sample, compiled or eager."""
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

    @property
    def metrics(self) -> Mapping[str, Reduction]:
        """None beside the loss."""
        return {}

    def count(self, batch: LatentBatch) -> int:
        """Text and image tokens, as speed and FLOPs count them."""
        return int(batch.weights.sum()) * _tokens(batch)

    def prepare(self, batch: LatentBatch, seed: int) -> LatentBatch:
        """Draw noise, times and dropped texts of a CPU batch."""
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
        """Give a batch of an evaluation, which has times and noise, the mean guidance if the model reads one."""
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
    """Time moved towards noise: e^μ / (e^μ + 1/t - 1), with μ by the number of image tokens."""
    (few, low), (many, high) = SHIFTS
    factor = math.exp(low + (high - low) * (image_tokens - few) / (many - few))
    return factor * time / (1 + (factor - 1) * time)
