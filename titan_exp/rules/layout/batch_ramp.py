"""Batch ramp rules: batches grow, the run reaches the last one, and the layout divides each of them."""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from titan_exp.config.errors.user_error import Violation, divisors, listed, multiples_near, nearest_numbers
from titan_exp.config.groups.parallelism import ParallelismConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.layout.pipeline_schedules import is_file, takes
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.rules.layout.pipeline_parallel import accepted_numbers, fits, schedule_is_known
from titan_exp.rules.rule import rules

FIELD = "training.batch_ramp"


def batches_grow(training: TrainingConfig) -> Iterator[Violation]:
    """Every batch is larger than the one before, and the last is `training.global_batch_size`."""
    for before, after in pairwise(training.batch_sizes):
        if before >= after:
            last = after == training.global_batch_size
            reason = f"{before} sequences before {after}{' (training.global_batch_size)' if last else ''} is no growth"
            yield _violation(training, reason, "pairs of steps and sequences, each with more sequences than the last")
            return


def run_reaches_the_last_batch(training: TrainingConfig) -> Iterator[Violation]:
    """The ramp ends before the run does."""
    length = sum(steps for steps, _ in training.batch_ramp)
    if length >= training.steps > 0:
        reason = f"it lasts {length} steps, and the run of {training.steps} never has training.global_batch_size="
        remedy = f"training.steps above {length}, or a shorter ramp"
        yield _violation(training, f"{reason}{training.global_batch_size}", remedy)


def micro_batches_are_whole(training: TrainingConfig, layout: ResolvedLayout) -> Iterator[Violation]:
    """Every data-parallel rank runs the same whole number of micro-batches in each batch of the ramp."""
    ranks, micro = layout.dp_degree, training.micro_batch_size or 1
    for _, size in training.batch_ramp:
        if size % (ranks * micro):
            parts = f" in micro-batches of {micro}" if micro > 1 else ""
            reason = f"its batch of {size} cannot be divided among {ranks} data-parallel rank{'s' * (ranks > 1)}{parts}"
            sizes = nearest_numbers(micro, divisors(size // ranks)) if size % ranks == 0 else []
            more = f"; or training.micro_batch_size={listed(sizes)}" if sizes else ""
            yield _violation(
                training, reason, f"nearest: {listed(multiples_near(size, ranks * micro))} sequences{more}"
            )


def passes_are_whole(
    parallelism: ParallelismConfig, training: TrainingConfig, layout: ResolvedLayout
) -> Iterator[Violation]:
    """Every batch of the ramp is a whole number of passes through the pipeline."""
    ranks, micro, number = layout.dp_degree, training.micro_batch_size, parallelism.pp_microbatches
    indivisible = any(size % (ranks * (micro or 1)) for size in training.batch_sizes)
    if indivisible or any(schedule_is_known(parallelism)):
        return
    shares = [size // ranks for size in training.batch_sizes]
    if micro is None:
        works = _sizes(shares, layout.common_share, lambda count: takes(parallelism, count))
        if not works if number is None else layout.common_share % number:
            reason = f"a data rank's shares of {listed(shares, 'and')} sequences have no micro-batch for all of them: "
            reason += _taken(parallelism)
            yield _violation(training, reason, _remedy(parallelism, shares, layout.common_share))
        return
    for share in shares[:-1]:
        if not _is_whole(parallelism, share // micro):
            reason = f"a batch of {share * ranks} makes {share // micro} micro-batches of a data rank, and "
            remedy = _remedy(parallelism, shares, layout.common_share)
            yield _violation(training, reason + _taken(parallelism), remedy)


def _is_whole(parallelism: ParallelismConfig, count: int) -> bool:
    number = parallelism.pp_microbatches
    return fits(parallelism, count) if number is None else count % number == 0


def _taken(parallelism: ParallelismConfig) -> str:
    number = parallelism.pp_microbatches
    if number is not None:
        return f"parallelism.pp_microbatches={number} must divide them"
    return f"{parallelism.pp_schedule} takes {accepted_numbers(parallelism)}"


def _remedy(parallelism: ParallelismConfig, shares: Iterable[int], common: int) -> str:
    sizes = _sizes(shares, common, lambda count: _is_whole(parallelism, count))
    other = "another parallelism.pp_schedule, or other batches"
    if sizes:
        return f"training.micro_batch_size={listed(sizes[-3:])}; or {other}"
    return f"larger batches, {'' if is_file(parallelism.pp_schedule) else 'a smaller parallelism.pp, '}or {other}"


def _sizes(shares: Iterable[int], common: int, takes_count: Callable[[int], bool]) -> list[int]:
    """Micro-batch sizes that divide every share into a number of micro-batches that is taken."""
    return [size for size in divisors(common) if all(takes_count(share // size) for share in shares)]


def _violation(training: TrainingConfig, reason: str, remedy: str) -> Violation:
    return Violation(FIELD, [list(stage) for stage in training.batch_ramp], reason, remedy)


def _has_ramp(training: TrainingConfig) -> bool:
    return bool(training.batch_ramp)


RAMP_RULES = rules(batches_grow, run_reaches_the_last_batch, when=_has_ramp)
RAMP_LAYOUT_RULES = (
    *rules(micro_batches_are_whole, when=_has_ramp),
    *rules(passes_are_whole, when=lambda training, parallelism: _has_ramp(training) and parallelism.pp > 1),
)
