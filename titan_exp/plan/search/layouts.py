"""All layouts of a model on a number of GPUs: what is tried for each key, and which of them the rules allow.

Which layouts can be is asked of `config.rules` alone; nothing here knows a rule. Imports no torch.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from titan_exp.config.errors.did_you_mean import divisors
from titan_exp.config.errors.user_error import UserError, Violation, shown
from titan_exp.config.groups.experiment import Experiment
from titan_exp.rules import violations

DEGREES = ("dp_replicate", "dp_shard", "tp", "cp", "pp")
"""Degrees whose product is the number of GPUs, as parallelism's keys."""
SCHEDULES = ("1F1B", "Interleaved1F1B")
"""Schedules that are tried. GPipe and LoopedBFS have the bubbles of these two and hold more micro-batches."""
MODES = ("none", "selective", "full")
"""Ways of recomputation that are tried."""
LARGEST_MICRO_BATCH = 8
"""Sequences of the largest micro-batch that is tried."""
KEYS = (
    *(f"parallelism.{degree}" for degree in DEGREES),
    "parallelism.pp_schedule",
    "training.micro_batch_size",
    "activation_checkpoint.mode",
)
"""What is searched, unless it is fixed on the command line."""


@dataclass(frozen=True)
class SearchSpace:
    """What may be launched."""

    experiments: list[Experiment]
    """Layouts that keep every rule."""
    tried: int
    """How many were looked at."""
    left_out: list[tuple[int, Violation]]
    """How many of them break a rule of each key, and an example, the most frequent first."""


def fixed_keys(overrides: Sequence[str]) -> frozenset[str]:
    """The searched keys that were typed, and are not searched then."""
    typed = {override.lstrip("+").partition("=")[0] for override in overrides}
    fixed = {key for key in KEYS if key in typed}
    if "activation_checkpoint" in typed:
        fixed.add("activation_checkpoint.mode")
    return frozenset(fixed)


def search_space(experiment: Experiment, gpus: int, fixed: Collection[str]) -> SearchSpace:
    """All layouts on so many GPUs.

    Args:
        experiment: what is not searched.
        gpus: their number.
        fixed: keys that keep the experiment's values.

    Raises:
        UserError: no layout can be, with what is most often in the way.
    """
    found, tried = list[Experiment](), 0
    broken: Counter[str] = Counter()
    examples: dict[str, Violation] = {}
    for candidate in _all(experiment, gpus, fixed):
        tried += 1
        wrong = violations(candidate)
        if not wrong:
            found.append(candidate)
            continue
        broken[wrong[0].field] += 1
        examples.setdefault(wrong[0].field, wrong[0])
    left_out = [(count, examples[field]) for field, count in broken.most_common()]
    if not tried:
        degrees = {
            key: getattr(experiment.parallelism, key.partition(".")[2]) for key in sorted(fixed) if key in KEYS[:5]
        }
        said = " ".join(f"{key}={value}" for key, value in degrees.items())
        raise UserError(
            f"plan search: {gpus} GPUs cannot be laid out with {said}, which must divide them. "
            "--gpus takes another number; leave a degree out to have it searched."
        )
    if not found:
        raise UserError(
            f"plan search: none of {tried} layouts on {gpus} GPUs can be.", [its for _, its in left_out[:3]]
        )
    return SearchSpace(found, tried, left_out)


def command_line(experiment: Experiment, typed: Sequence[str], more: Mapping[str, Any]) -> str:
    """What launches a layout: what was typed, and the searched keys with their values."""
    values: dict[str, Any] = {f"parallelism.{degree}": getattr(experiment.parallelism, degree) for degree in DEGREES}
    if experiment.parallelism.pp > 1:
        values["parallelism.pp_schedule"] = experiment.parallelism.pp_schedule
    values["training.micro_batch_size"] = experiment.training.micro_batch_size
    values["activation_checkpoint.mode"] = experiment.activation_checkpoint.mode
    values |= more
    kept = [word for word in typed if word.lstrip("+").partition("=")[0] not in values]
    return " ".join(
        ["titan-exp train", *map(_quoted, kept), *(f"{key}={shown(value)}" for key, value in values.items())]
    )


def _all(experiment: Experiment, gpus: int, fixed: Collection[str]) -> Iterator[Experiment]:
    parallelism, training = experiment.parallelism, experiment.training
    for degrees in _degrees(experiment, gpus, fixed):
        schedules = (
            (parallelism.pp_schedule,) if "parallelism.pp_schedule" in fixed or degrees["pp"] == 1 else SCHEDULES
        )
        share = max(1, training.global_batch_size // (degrees["dp_replicate"] * degrees["dp_shard"]))
        sizes = (
            [training.micro_batch_size]
            if "training.micro_batch_size" in fixed
            else [size for size in divisors(share) if size <= LARGEST_MICRO_BATCH]
        )
        modes = [experiment.activation_checkpoint.mode] if "activation_checkpoint.mode" in fixed else MODES
        for schedule, size, mode in product(schedules, sizes, modes):
            yield replace(
                experiment,
                parallelism=replace(parallelism, **degrees, pp_schedule=schedule),
                training=replace(training, micro_batch_size=size),
                activation_checkpoint=replace(experiment.activation_checkpoint, mode=mode),
            )


def _degrees(experiment: Experiment, gpus: int, fixed: Collection[str]) -> Iterator[dict[str, int]]:
    """Every way to write the number of GPUs as a product of the degrees, those that are fixed kept."""
    *searched, last = sorted(DEGREES, key=lambda degree: f"parallelism.{degree}" not in fixed)

    def choices(degree: str, left: int) -> list[int]:
        value = getattr(experiment.parallelism, degree)
        if f"parallelism.{degree}" in fixed and value > 0:
            return [value] if left % value == 0 else []
        return divisors(left)

    def chosen(degrees: Sequence[str], left: int) -> Iterator[dict[str, int]]:
        if not degrees:
            if left in choices(last, left):
                yield {last: left}
            return
        for value in choices(degrees[0], left):
            for rest in chosen(degrees[1:], left // value):
                yield {degrees[0]: value, **rest}

    yield from chosen(searched, gpus)


def _quoted(word: str) -> str:
    return f"'{word}'" if set(word) & set('[]{}()*?$ "<>|&;') else word
