"""Divisibility of the global batch and of virtual shards by the data-parallel degree."""

from collections.abc import Iterator

from titan_exp.config.errors.did_you_mean import divisors, listed, nearest_numbers
from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.data import DataConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.rules.rule import not_a_multiple, rules


def whole_micro_batches(training: TrainingConfig, layout: ResolvedLayout) -> Iterator[Violation]:
    """Every data-parallel rank runs the same whole number of micro-batches."""
    ranks, micro = layout.dp_degree, training.micro_batch_size or 1
    if training.global_batch_size % (ranks * micro) == 0:
        return
    sizes = nearest_numbers(micro, divisors(training.global_batch_size // ranks))
    yield not_a_multiple(
        "training.global_batch_size",
        training.global_batch_size,
        ranks * micro,
        f"it cannot be divided among {_ranks(ranks)}{f' in micro-batches of {micro}' if micro > 1 else ''}",
        f"; or training.micro_batch_size={listed(sizes)}" if training.global_batch_size % ranks == 0 else "",
    )


def whole_virtual_shards(data: DataConfig, layout: ResolvedLayout) -> Iterator[Violation]:
    """Every data-parallel rank reads the same number of virtual shards; token stores have none."""
    shards, ranks = data.virtual_shards, layout.dp_degree
    if data.source != "tokens" and shards % ranks:
        yield not_a_multiple(
            "data.virtual_shards",
            shards,
            ranks,
            f"it cannot be divided among {_ranks(ranks)}",
            f" (another order of data); or make dp_replicate × dp_shard "
            f"{listed(nearest_numbers(ranks, divisors(shards)))}",
        )


def _ranks(count: int) -> str:
    return f"{count} data-parallel ranks" if count > 1 else "1 data-parallel rank"


RULES = rules(whole_micro_batches, whole_virtual_shards)
