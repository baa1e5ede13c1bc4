"""Rules about what the layout divides: the global batch and the virtual shards."""

from collections.abc import Iterator

from titan_exp.config.errors.did_you_mean import divisors, listed, multiples_near, nearest_numbers
from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout


def whole_micro_batches(experiment: Experiment) -> Iterator[Violation]:
    """Every data rank runs the same whole number of micro-batches."""
    training, ranks = experiment.training, ResolvedLayout.of(experiment).dp_degree
    micro = training.micro_batch_size or 1
    if training.global_batch_size % (ranks * micro) == 0:
        return
    nearest = listed(multiples_near(training.global_batch_size, ranks * micro))
    remedy = f"nearest: training.global_batch_size={nearest}"
    share, rest = divmod(training.global_batch_size, ranks)
    if rest == 0:
        sizes = listed(nearest_numbers(micro, divisors(share)))
        remedy += f"; or training.micro_batch_size={sizes}"
    yield Violation(
        "training.global_batch_size",
        training.global_batch_size,
        f"it cannot be divided among {_ranks(ranks)}{f' in micro-batches of {micro}' if micro > 1 else ''}",
        remedy,
    )


def whole_virtual_shards(experiment: Experiment) -> Iterator[Violation]:
    """Every data rank reads the same number of virtual shards; token stores have none."""
    if experiment.data.source == "tokens":
        return
    shards, ranks = experiment.data.virtual_shards, ResolvedLayout.of(experiment).dp_degree
    if shards % ranks:
        yield Violation(
            "data.virtual_shards",
            shards,
            f"it cannot be divided among {_ranks(ranks)}",
            f"nearest: data.virtual_shards={listed(multiples_near(shards, ranks))} (another order of data); "
            f"or make dp_replicate × dp_shard {listed(nearest_numbers(ranks, divisors(shards)))}",
        )


def _ranks(count: int) -> str:
    return f"{count} data-parallel ranks" if count > 1 else "1 data-parallel rank"


RULES = (whole_micro_batches, whole_virtual_shards)
