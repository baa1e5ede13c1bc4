"""Grids of images during training: fixed captions and noise, drawn with the averaged weights if the run has them."""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from titan_exp.config.checkpoint_files import step_name
from titan_exp.config.data_files import SPLITS
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.run import DataConfig
from titan_exp.extensions.diffusion import rectified_flow
from titan_exp.extensions.diffusion.encoders import encoders_of_samples, image_codec
from titan_exp.extensions.diffusion.images import image_grid, save_image
from titan_exp.extensions.diffusion.latents import open_latents
from titan_exp.extensions.diffusion.samples import grid_positions
from titan_exp.optim.weight_average import WeightAverage
from titan_exp.tracking.logging import get_logger
from titan_exp.trainer.forward_backward import Model
from titan_exp.trainer.part import Part, Phase, Run, Step
from titan_exp.trainer.train_state import TrainState

SAMPLES = 8  # number of captions per split, which form a row of the grid
STEPS, GUIDANCE = 25, 4.0  # euler steps, and scale of classifier-free guidance


def parts(experiment: Experiment, state: TrainState) -> Iterator[Part]:
    """Part that draws a run's images. Raises UserError if the samples or the packages of their decoder are missing."""
    tracking: Any = experiment.tracking
    yield TrainingImages(experiment.data, tracking.images_every, state.model, state.average)


class TrainingImages(Part):
    """Draws images for the first training captions and the first held-out captions, with the same noise each time.
    Every rank computes all of them, and rank 0 decodes and writes. Raises UserError if the samples or the packages of
    their decoder are missing."""

    name = "images"
    phase = Phase.REPORT

    def __init__(self, config: DataConfig, every: int, model: Model, average: WeightAverage | None) -> None:
        self._model, self._average = model, average
        assert isinstance(model.objective, rectified_flow.RectifiedFlow), "checked by the rules"
        self._every, options = every, model.objective.options
        data = open_latents(config)
        encoded, splits = data.format, [data.splits[split] for split in SPLITS]
        self._shape = encoded.rows, encoded.columns
        counts = [min(SAMPLES, len(split)) for split in splits]
        self._captions = [
            text for split, count in zip(splits, counts, strict=True) for text in split.captions()[:count]
        ]
        samples = [split[index] for split, count in zip(splits, counts, strict=True) for index in range(count)]
        positions = grid_positions(encoded.text_tokens, *self._shape)
        guidance = sum(options.guidance) / 2 if model.objective.guided else None
        states, pooled = (
            torch.from_numpy(np.stack([getattr(sample, name) for sample in samples])) for name in ("text", "pooled")
        )
        empty = splits[0].batch([0], [0], [1.0])
        self._given = rectified_flow.Conditions(states, pooled, positions, guidance)
        self._empty = rectified_flow.Conditions(empty.empty_text, empty.empty_pooled, positions, guidance)
        tokens = encoded.rows * encoded.columns
        self._noise = rectified_flow.sampling_noise(0, range(len(samples)), tokens, encoded.channels)
        self._times = rectified_flow.sampling_times(STEPS, tokens, shift=options.shift)
        with encoders_of_samples():
            self._codec = image_codec(encoded.latents) if torch.distributed.get_rank() == 0 else None

    def begin(self, run: Run) -> None:
        self._folder, self._report = run.folder, run.report

    def due(self, step: int, *, last: bool) -> bool:
        return last or step % self._every == 0

    def after(self, step: Step) -> None:
        if self._report.writes and self.due(step.step, last=step.last):
            self._write(step.step)

    def _write(self, step: int) -> None:
        folder, average = self._folder, self._average
        averaged = average is not None and average.steps > 0
        with average.in_use() if average is not None and averaged else nullcontext():
            latents = self.latents(self._model)
        if self._codec is None:
            return
        images = list(self._codec.decode(latents.cpu().numpy(), *self._shape))
        grid = image_grid(images, self._captions, SAMPLES)
        target = folder.images / f"{step_name(step)}.png"
        try:
            folder.images.mkdir(exist_ok=True)
            part = target.with_suffix(".part.png")
            save_image(part, grid, {"step": step, "guidance": GUIDANCE, "averaged": averaged})
            os.replace(part, target)
        except OSError as error:
            get_logger().warning("could not write %s (%s), and training continues", target, error)
        self._report.image("images", step, grid)

    def latents(self, model: Model) -> torch.Tensor:
        """Latents [samples, image, channels] of all captions."""
        device = next(model.parameters()).device
        predict = rectified_flow.guided_velocity(
            model.outputs, self._given.to(device), self._empty.to(device), GUIDANCE
        )
        for part in model.parts:
            part.eval()
        latents = rectified_flow.euler(predict, self._noise.to(device), self._times)
        for part in model.parts:
            part.train()
        return latents
