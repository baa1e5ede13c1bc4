"""Layouts of a search: searched keys, seeds on a number of GPUs, and launch commands. Imports no torch."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from operator import attrgetter
from shlex import quote
from typing import Any

from titan_exp.config.errors.user_error import UserError, divisors, shown
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.parallelism import ParallelismConfig, QuantizationConfig
from titan_exp.config.layout.axes import DEGREES
from titan_exp.config.layout.resolved_layout import ResolvedLayout, resolve_kernels, share_of_world
from titan_exp.models.spec.lookup import model_spec
from titan_exp.models.spec.model_spec import ModelSpec

SCHEDULES = ("1F1B", "Interleaved1F1B")
"""Searched schedules. GPipe and LoopedBFS have the same bubbles with more micro-batches in flight."""
MAX_MICRO_BATCH = 8
"""Largest searched micro-batch in sequences."""
SCHEDULE, EP, ETP = "parallelism.pp_schedule", "parallelism.ep", "parallelism.etp"
MICRO_BATCH, MODE = "training.micro_batch_size", "activation_checkpoint.mode"
DEGREE_KEYS = (*(f"parallelism.{degree}" for degree in DEGREES), EP, ETP)
KEYS = (*DEGREE_KEYS[:-2], SCHEDULE, EP, ETP, MICRO_BATCH, MODE)
"""Searched keys, unless fixed on the command line, of which commands give every value."""
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
"""Searched keys, unless fixed, of which commands give the values that the typed run does not have."""
RECIPE = "quantization"
"""Group of recipes, searched like `REFINED` if asked for."""
MODES = ("none", "selective", "full")
"""Modes of recomputation, the fastest first, of which seeds have the first that the rules allow."""
SEED_PIPELINES, SEED_TOKENS = (2, 8), 2**14
"""Degrees of the seeds' pipelines, and most tokens of their micro-batches."""


@dataclass(frozen=True)
class Candidate:
    """Layout of a search."""

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
        """Values of `KEYS`."""
        return values_of(KEYS, self.experiment)

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
        has_experts = self.spec is not None and self.spec.has_experts
        idle = [*([SCHEDULE] if self.parallelism.pp == 1 else []), *([] if has_experts else [EP, ETP])]
        values = {key: value for key, value in zip(KEYS, self.base, strict=True) if key not in idle}
        return values | dict(self.refined)


@dataclass(frozen=True)
class SearchSpace:
    """Searched keys of a run on a number of GPUs."""

    run: Experiment
    """Typed run, with its kernels resolved."""
    gpus: int
    fixed: frozenset[str] = frozenset()
    """Keys that keep the run's values."""
    recipes: Mapping[str, QuantizationConfig] = field(default_factory=dict)
    """Recipes to choose from, by name."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "run", resolve_kernels(self.run))

    def candidate(self, experiment: Experiment, recipe: str | None = None) -> Candidate:
        """Layout with its differences from the typed run; `recipe` is another one than the typed one."""
        typed = zip(REFINED, values_of(REFINED, experiment), values_of(REFINED, self.run), strict=True)
        refined = {key: value for key, value, before in typed if value != before}
        more = [(RECIPE, recipe)] if recipe else []
        return Candidate(experiment, model_spec(experiment.model), (*refined.items(), *more))

    def seeds(self, mode: str) -> Iterator[Iterator[Candidate]]:
        """Layouts that are like each seed of a search, the most alike first; they may break rules.

        Seeds are FSDP alone, and with tensor parallelism in a node, replicas, context, pipeline and expert parallelism.
        Raises UserError if no product of degrees is the number of GPUs.
        """
        layouts = list(self._layouts(mode))
        if not layouts:
            given = [key for key in sorted(self.fixed) if key.partition(".")[2] in DEGREES]
            degrees = " ".join(f"{key}={attrgetter(key)(self.run)}" for key in given)
            raise UserError(
                f"plan search: {degrees} does not divide {self.gpus} GPUs. Use another --gpus, or leave a degree out, "
                "which searches it."
            )
        node = ResolvedLayout.of(layouts[0]).node_size
        plain = [{}, {"tp": node}, {"dp_replicate": max(2, self.gpus // node)}, {"cp": 2}, {"ep": node}]
        pipelines = [{"pp": pp, **more} for pp in SEED_PIPELINES for more in ({}, {"tp": node}, {"ep": node})]
        experts = any(layout.parallelism.ep > 1 for layout in layouts)
        for ideal in (*plain, *pipelines):
            if experts or "ep" not in ideal:
                yield (self.candidate(each) for each in sorted(layouts, key=lambda each: _distance(each, ideal)))

    def _layouts(self, mode: str) -> Iterator[Experiment]:
        """Products of degrees, with one schedule, size of micro-batches, and `mode` of recomputation."""
        run, fixed = self.run, self.fixed
        checkpointing = run.activation_checkpoint if MODE in fixed else replace(run.activation_checkpoint, mode=mode)
        for degrees in _degrees(run.parallelism, self.gpus, fixed):
            rows = math.gcd(*run.training.batch_sizes) // (degrees["dp_replicate"] * degrees["dp_shard"])
            # Micro-batches are small where they fill a pipeline.
            most = 1 if degrees["pp"] > 1 else SEED_TOKENS * degrees["cp"] // run.training.seq_len
            size = micro_batches(rows, min(MAX_MICRO_BATCH, max(1, most)))[-1]
            batch = {} if MICRO_BATCH in fixed else {"micro_batch_size": size}
            schedule = run.parallelism.pp_schedule if SCHEDULE in fixed or degrees["pp"] == 1 else SCHEDULES[0]
            for ep, etp in expert_degrees(run, degrees, fixed):
                yield replace(
                    run,
                    parallelism=replace(run.parallelism, **degrees, pp_schedule=schedule, ep=ep, etp=etp),
                    training=replace(run.training, **batch),
                    activation_checkpoint=checkpointing,
                )


def _distance(layout: Experiment, ideal: Mapping[str, int]) -> float:
    """Doublings of degrees between a layout and an ideal one, which uses no axis that it does not name."""
    own = layout.parallelism
    searched = ("dp_replicate", "tp", "cp", "pp", "ep", "etp")
    return sum(abs(math.log2(getattr(own, key) / ideal.get(key, 1))) for key in searched)


def fixed_keys(overrides: Sequence[str]) -> frozenset[str]:
    """Searched keys fixed by overrides."""
    typed = {override.lstrip("+").partition("=")[0] for override in overrides}
    groups = typed & {"activation_checkpoint", "compile", RECIPE}
    return frozenset(key for key in (*KEYS, *REFINED, RECIPE) if key in typed or key.partition(".")[0] in groups)


def train_command(candidate: Candidate, typed: Sequence[str], more: Mapping[str, Any]) -> str:
    """Launch command of a layout: typed overrides, searched keys, and `more` keys with values."""
    values = {**candidate.values, **more}
    kept = [word for word in typed if word.lstrip("+").partition("=")[0] not in values]
    return " ".join(["titan-exp train", *map(quote, kept), *(f"{key}={shown(value)}" for key, value in values.items())])


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


def micro_batches(sequences: int, most: int = MAX_MICRO_BATCH) -> list[int]:
    """Searched sizes of micro-batches for a data-parallel rank with so many sequences."""
    return [size for size in divisors(max(1, sequences)) if size <= most]


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


def values_of(keys: Sequence[str], experiment: Experiment) -> tuple[Any, ...]:
    """Values of keys."""
    return attrgetter(*keys)(experiment)
