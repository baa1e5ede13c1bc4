"""Search space of layouts: valid combinations of searched keys on a number of GPUs. Imports no torch."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from operator import attrgetter
from shlex import quote
from typing import Any

from titan_exp.config.errors.user_error import UserError, Violation, divisors, shown
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.parallelism import ParallelismConfig, QuantizationConfig
from titan_exp.config.layout.axes import DEGREES, regroups_experts
from titan_exp.config.layout.resolved_layout import ResolvedLayout, resolve_kernels, share_of_world
from titan_exp.models.spec.lookup import model_spec
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.plan.search.layout_checks import LayoutChecks
from titan_exp.rules import EVERY_RULE
from titan_exp.rules.rule import Rule, find_violations

SCHEDULES = ("1F1B", "Interleaved1F1B")
"""Searched schedules. GPipe and LoopedBFS have the same bubbles with more micro-batches in flight."""
MODES = ("none", "selective", "full")
"""Searched values of activation_checkpoint.mode."""
MAX_MICRO_BATCH = 8
"""Largest searched micro-batch in sequences."""
SCHEDULE, EP, ETP = "parallelism.pp_schedule", "parallelism.ep", "parallelism.etp"
KEYS = (
    *(f"parallelism.{degree}" for degree in DEGREES),
    SCHEDULE,
    EP,
    ETP,
    "training.micro_batch_size",
    "activation_checkpoint.mode",
)
"""Enumerated keys, unless fixed on the command line."""
REFINED = (
    "activation_checkpoint.every",
    "activation_checkpoint.budget",
    "compile.enabled",
    "parallelism.async_tp",
    "parallelism.cp_method",
    "parallelism.pp_layers_per_stage",
    "parallelism.reshard_after_forward",
    "training.loss_chunk_tokens",
)
"""Keys that are searched near the fastest layouts, unless fixed."""
RECIPE = "quantization"
"""Group of recipes, searched like `REFINED` if asked for."""


@dataclass(frozen=True)
class Candidate:
    """Layout of the search space."""

    number: int
    """Index in the search space."""
    experiment: Experiment
    spec: ModelSpec | None
    refined: tuple[tuple[str, Any], ...] = ()
    """Values of `REFINED` keys, and a recipe, that the typed run does not have."""

    @cached_property
    def identity(self) -> tuple[Any, ...]:
        """Values of all searched keys."""
        return self.base, self.refined

    @cached_property
    def base(self) -> tuple[Any, ...]:
        """Values of enumerated keys."""
        return _values_of(KEYS, self.experiment)

    @cached_property
    def layout(self) -> ResolvedLayout:
        """Resolved layout, of a world with its share of a step."""
        return ResolvedLayout.of(share_of_world(self.experiment))

    @property
    def parallelism(self) -> ParallelismConfig:
        """Degrees and pipeline options."""
        return self.experiment.parallelism

    @property
    def mode(self) -> str:
        """Activation checkpointing mode."""
        return self.experiment.activation_checkpoint.mode

    @property
    def values(self) -> dict[str, Any]:
        """Values of searched keys that make the typed run this one."""
        idle = [*([SCHEDULE] if self.parallelism.pp == 1 else []), *([EP, ETP] if self.experts is None else [])]
        values = {key: value for key, value in zip(KEYS, self.base, strict=True) if key not in idle}
        return values | dict(self.refined)

    @property
    def shards(self) -> int:
        """Number of FSDP shards of parameters."""
        return self.parallelism.dp_shard * self.parallelism.cp

    @cached_property
    def experts(self) -> tuple[int, int, bool, bool] | None:
        """Degrees `ep` and `etp`, and whether experts are sharded over other ranks than other weights, and over more
        than one; None without experts.

        Layouts that differ in it gather other weights, send other messages and copy other rows.
        """
        parallelism = self.parallelism
        if self.spec is None or not self.spec.has_experts:
            return None
        shards = parallelism.dp_shard * parallelism.cp * parallelism.tp // (parallelism.ep * parallelism.etp)
        return parallelism.ep, parallelism.etp, regroups_experts(parallelism), shards > 1


@dataclass(frozen=True)
class SearchSpace:
    """Search space of valid layouts."""

    candidates: list[Candidate]
    """Layouts that break no rule."""
    tried: int
    """Number of enumerated layouts."""
    left_out: list[tuple[int, Violation]]
    """Number of layouts that break a rule by key, with an example, the most frequent first."""
    fixed: frozenset[str]
    """Keys that keep the run's values."""
    recipes: Mapping[str, QuantizationConfig] = field(default_factory=dict)
    """Recipes to choose from, by name."""

    def moved(self, candidate: Candidate, experiment: Experiment, recipe: str | None = None) -> Candidate:
        """Candidate near another one; `recipe` is a new one."""
        typed = zip(REFINED, _values_of(REFINED, experiment), _values_of(REFINED, self.base), strict=True)
        refined = {key: value for key, value, before in typed if value != before}
        recipe = recipe or dict(candidate.refined).get(RECIPE)
        return Candidate(-1, experiment, candidate.spec, (*refined.items(), *([(RECIPE, recipe)] if recipe else [])))

    @property
    def base(self) -> Experiment:
        """An enumerated run, of which no `REFINED` key differs from the typed one."""
        return self.candidates[0].experiment


def fixed_keys(overrides: Sequence[str]) -> frozenset[str]:
    """Searched keys fixed by overrides."""
    typed = {override.lstrip("+").partition("=")[0] for override in overrides}
    groups = typed & {"activation_checkpoint", "compile", RECIPE}
    return frozenset(key for key in (*KEYS, *REFINED, RECIPE) if key in typed or key.partition(".")[0] in groups)


def search_space(
    experiment: Experiment, gpus: int, fixed: Collection[str], recipes: Mapping[str, QuantizationConfig] | None = None
) -> SearchSpace:
    """Enumerate the layouts of a run on a number of GPUs; `fixed` keys keep the run's values. Raises UserError with the
    most frequent violations if every layout breaks a rule."""
    candidates, broken, spec = list[Candidate](), defaultdict[str, list[Violation]](list), model_spec(experiment.model)
    checks = LayoutChecks([partial(_first_violation, rule) for rule in EVERY_RULE], KEYS)
    for layout in _enumerate(experiment, gpus, fixed):
        if (wrong := checks.first(layout)) is None:
            candidates.append(Candidate(len(candidates), layout, spec))
        else:
            broken[wrong.field].append(wrong)
    left_out = [(len(alike), alike[0]) for alike in sorted(broken.values(), key=len, reverse=True)]
    tried = len(candidates) + sum(count for count, _ in left_out)
    if not tried:
        given = [key for key in sorted(fixed) if key.partition(".")[2] in DEGREES]
        degrees = " ".join(f"{key}={attrgetter(key)(experiment)}" for key in given)
        raise UserError(
            f"plan search: {degrees} does not divide {gpus} GPUs. Use another --gpus, or leave a degree out, which "
            "searches it."
        )
    if not candidates:
        most = [example for _, example in left_out[:3]]
        raise UserError(f"plan search: each of {tried} layouts on {gpus} GPUs breaks a rule.", most)
    return SearchSpace(candidates, tried, left_out, frozenset(fixed), recipes or {})


def _first_violation(rule: Rule, experiment: Experiment) -> Violation | None:
    return next(iter(find_violations((rule,), experiment)), None)


def train_command(candidate: Candidate, typed: Sequence[str], more: Mapping[str, Any]) -> str:
    """Launch command of a layout: typed overrides, searched keys, and `more` keys with values."""
    values = {**candidate.values, **more}
    kept = [word for word in typed if word.lstrip("+").partition("=")[0] not in values]
    return " ".join(["titan-exp train", *map(quote, kept), *(f"{key}={shown(value)}" for key, value in values.items())])


def _enumerate(experiment: Experiment, gpus: int, fixed: Collection[str]) -> Iterator[Experiment]:
    experiment = resolve_kernels(experiment)
    parallelism, training, checkpointing = experiment.parallelism, experiment.training, experiment.activation_checkpoint
    modes = [checkpointing.mode] if "activation_checkpoint.mode" in fixed else MODES
    for degrees in _degrees(parallelism, gpus, fixed):
        schedules = [parallelism.pp_schedule] if SCHEDULE in fixed or degrees["pp"] == 1 else SCHEDULES
        rows = math.gcd(*training.batch_sizes) // (degrees["dp_replicate"] * degrees["dp_shard"])
        typed = "training.micro_batch_size" in fixed
        sizes = [training.micro_batch_size] if typed else micro_batches(rows)
        kinds = [
            replace(parallelism, **degrees, pp_schedule=schedule, ep=ep, etp=etp)
            for schedule, (ep, etp) in product(schedules, expert_degrees(experiment, degrees, fixed))
        ]
        batches = [replace(training, micro_batch_size=size) for size in sizes]
        saved = [replace(checkpointing, mode=mode) for mode in modes]
        for kind, batch, mode in product(kinds, batches, saved):
            yield replace(experiment, parallelism=kind, training=batch, activation_checkpoint=mode)


def expert_degrees(
    experiment: Experiment, degrees: Mapping[str, int], fixed: Collection[str]
) -> Iterator[tuple[int, int]]:
    """Searched values of `parallelism.ep` and `etp`: experts are whole or divided by `tp`, and `ep` divides the
    regrouped ranks and the experts."""
    parallelism, spec = experiment.parallelism, model_spec(experiment.model)
    counts = [] if spec is None else [linear.experts for linear in spec.expert_linears]
    for etp in [parallelism.etp] if ETP in fixed or not counts else sorted({1, degrees["tp"]}):
        ranks = degrees["dp_shard"] * degrees["cp"] * degrees["tp"] // etp
        for ep in [parallelism.ep] if EP in fixed or not counts else divisors(math.gcd(ranks, *counts)):
            yield ep, etp


def micro_batches(sequences: int) -> list[int]:
    """Searched sizes of micro-batches for a data-parallel rank with so many sequences."""
    return [size for size in divisors(max(1, sequences)) if size <= MAX_MICRO_BATCH]


def _degrees(parallelism: ParallelismConfig, gpus: int, fixed: Collection[str]) -> Iterator[dict[str, int]]:
    """Factorizations of the number of GPUs into degrees that keep the fixed ones."""
    typed = {degree: getattr(parallelism, degree) for degree in DEGREES if f"parallelism.{degree}" in fixed}
    *searched, last = sorted(DEGREES, key=lambda degree: degree not in typed)
    # -1 takes what is left.
    choices = {degree: [typed[degree]] if typed.get(degree, 0) > 0 else divisors(gpus) for degree in DEGREES}
    for values in product(*(choices[degree] for degree in searched)):
        left, remainder = divmod(gpus, math.prod(values))
        if not remainder and left in choices[last]:
            yield {**dict(zip(searched, values, strict=True)), last: left}


def _values_of(keys: Sequence[str], experiment: Experiment) -> tuple[Any, ...]:
    return attrgetter(*keys)(experiment)
