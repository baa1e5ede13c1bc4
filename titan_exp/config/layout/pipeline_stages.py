"""How a model is divided into pipeline stages, and a rank's share of the batch into micro-batches."""

from titan_exp.config.errors.did_you_mean import divisors
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.parallelism import ParallelismConfig
from titan_exp.config.layout.pipeline_schedules import (
    SCHEDULES,
    is_file,
    microbatches_of,
    placement,
    placement_of,
    read_schedule,
    splits_backward,
)

FOR_EACH_RANK = 4
"""Micro-batches for each pipeline rank where the configuration does not say."""


def stage_layers(experiment: Experiment) -> list[list[int]]:
    """Numbers of the layers that each stage holds. The rules must hold."""
    counts = layer_counts(experiment)
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return [list(range(start, start + count)) for start, count in zip(starts, counts, strict=True)]


def layer_counts(experiment: Experiment) -> list[int]:
    """How many layers each stage holds; negative where it would have to hold fewer than none."""
    parallelism, layers = experiment.parallelism, experiment.model.layers
    if parallelism.pp_layers is not None:
        return list(parallelism.pp_layers)
    stages = stage_count(experiment)
    first, last = parallelism.pp_first_stage_less, parallelism.pp_last_stage_less
    # Divided as if the first and the last stage held what they have less.
    share, rest = divmod(layers + first + last, stages)
    counts = [share] * stages
    for stage in [*range(1, stages - 1), 0, stages - 1][:rest]:
        counts[stage] += 1
    counts[0] -= first
    counts[-1] -= last
    return counts


def stage_count(experiment: Experiment) -> int:
    """Stages of the whole model: what the keys say of it, else as many as the schedule has by default."""
    parallelism = experiment.parallelism
    if parallelism.pp_layers is not None:
        return len(parallelism.pp_layers)
    if parallelism.pp_layers_per_stage is not None:
        held = experiment.model.layers + parallelism.pp_first_stage_less + parallelism.pp_last_stage_less
        return -(-held // parallelism.pp_layers_per_stage)
    if is_file(parallelism.pp_schedule):
        return len(placement_of(read_schedule(parallelism.pp_schedule)))
    return parallelism.pp * SCHEDULES[parallelism.pp_schedule].stages_per_rank


def stage_placement(experiment: Experiment) -> list[int]:
    """The pipeline rank of each stage. The rules must hold."""
    parallelism = experiment.parallelism
    if is_file(parallelism.pp_schedule):
        return [rank for _, rank in sorted(placement_of(read_schedule(parallelism.pp_schedule)).items())]
    return placement(SCHEDULES[parallelism.pp_schedule], parallelism.pp, stage_count(experiment))


def pipeline_splits_backward(parallelism: ParallelismConfig) -> bool:
    """Whether gradients of weights are computed apart from those of inputs; never without a pipeline."""
    if parallelism.pp == 1:
        return False
    if is_file(parallelism.pp_schedule):
        return splits_backward(read_schedule(parallelism.pp_schedule))
    return SCHEDULES[parallelism.pp_schedule].splits_backward


def chosen_microbatches(experiment: Experiment, share: int) -> int:
    """Into how many micro-batches a data rank's share of the global batch is divided where no key says it.

    The fewest that divide it, that the schedule takes, and that are at least `FOR_EACH_RANK` for each pipeline rank;
    where there are not so many, the most.
    """
    parallelism = experiment.parallelism
    works = [number for number in divisors(share) if takes(parallelism, number)]
    enough = [number for number in works if number >= FOR_EACH_RANK * parallelism.pp]
    return (enough or works[-1:] or [1])[0]


def takes(parallelism: ParallelismConfig, microbatches: int) -> bool:
    """Whether the schedule can be laid out for so many micro-batches in one pass."""
    if is_file(parallelism.pp_schedule):
        return microbatches == microbatches_of(read_schedule(parallelism.pp_schedule))
    return SCHEDULES[parallelism.pp_schedule].takes(microbatches, parallelism.pp)
