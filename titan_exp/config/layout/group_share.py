"""Share of a step that one replica group trains."""

from dataclasses import replace

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout


def share_of_group(experiment: Experiment) -> Experiment:
    """The run as one group trains it: with the largest share of a step that a group has while all are alive."""
    groups = experiment.cluster.replica_groups
    if groups == 1:
        return experiment
    layout = ResolvedLayout.of(experiment)
    unit = layout.indivisible_microbatches
    own = -(-layout.gradient_accumulation // (unit * groups)) * unit
    sequences = own * layout.micro_batch_size * layout.dp_degree
    training = replace(
        experiment.training, global_batch_size=sequences, micro_batch_size=layout.micro_batch_size, batch_ramp=[]
    )
    return replace(experiment, training=training)
