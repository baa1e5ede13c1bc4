"""Small variant of a run for tracing."""

from collections.abc import Sequence
from dataclasses import replace

from titan_exp.config.groups.activation_checkpoint import ActivationCheckpointConfig
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.plan.extrapolate.layer_kinds import with_layers


def small_run(
    experiment: Experiment,
    layers: Sequence[int],
    micro_batches: int,
    checkpointing: ActivationCheckpointConfig,
    *,
    pp: int = 1,
    schedule: str = "1F1B",
) -> Experiment:
    """Variant of a run with the given layers per stage, micro-batches, pipeline and activation checkpointing."""
    layout, parallelism = ResolvedLayout.of(experiment), experiment.parallelism
    size, batch = layout.micro_batch_size, layout.dp_degree * layout.micro_batch_size * micro_batches
    if pp > 1:
        parallelism = replace(
            parallelism,
            pp=pp,
            pp_schedule=schedule,
            pp_microbatches=None,
            pp_layers=tuple(layers),
            pp_layers_per_stage=None,
            pp_first_stage_less=0,
            pp_last_stage_less=0,
        )
    small = with_layers(experiment, sum(layers))
    return replace(
        small,
        training=replace(small.training, global_batch_size=batch, micro_batch_size=size, batch_ramp=()),
        activation_checkpoint=checkpointing,
        parallelism=parallelism,
    )
