"""Small variants of a run, which are traced in its place."""

from collections.abc import Sequence
from dataclasses import replace

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout


def small_run(experiment: Experiment, layers: int, micro_batches: int, mode: str) -> Experiment:
    """The run with other numbers of layers and micro-batches, and one activation checkpointing mode."""
    layout = ResolvedLayout.of(experiment)
    size, batch = layout.micro_batch_size, layout.dp_degree * layout.micro_batch_size * micro_batches
    return replace(
        experiment,
        model=replace(experiment.model, layers=layers),
        training=replace(experiment.training, global_batch_size=batch, micro_batch_size=size),
        activation_checkpoint=replace(experiment.activation_checkpoint, mode=mode),
    )


def small_pipeline(
    experiment: Experiment, layers: Sequence[int], micro_batches: int, mode: str, *, degree: int, schedule: str
) -> Experiment:
    """The run with another pipeline: `layers` of each stage, and a schedule."""
    parallelism = replace(
        experiment.parallelism,
        pp=degree,
        pp_schedule=schedule,
        pp_microbatches=None,
        pp_layers=tuple(layers),
        pp_layers_per_stage=None,
        pp_first_stage_less=0,
        pp_last_stage_less=0,
    )
    return replace(small_run(experiment, sum(layers), micro_batches, mode), parallelism=parallelism)
