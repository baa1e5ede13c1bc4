"""Cross-field validation rules, checked before launch; all violations are reported together."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from titan_exp.config.devices import offered_devices
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.extension import loaded
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.rules import checkpoint, pipeline_parallel
from titan_exp.rules.cluster import CLUSTER_LAYOUT_RULES, CLUSTER_RULES, NAME_RULES, PATH_LAUNCH_RULES, PATH_RULES
from titan_exp.rules.compile import GRAPH_LAYOUT_RULES, GRAPH_RULES, RECOMPUTE_RULES
from titan_exp.rules.data import DATA_RULES, EVALUATION_RULES, LARGE_TEXT_LAUNCH_RULES, STORE_RULES
from titan_exp.rules.mesh import CONTEXT_RULES, DEGREE_RULES, TENSOR_RULES
from titan_exp.rules.model import CLIP_RULES, MODEL_RULES, PARAMETER_RULES, PARAMETRIZATION_RULES
from titan_exp.rules.quantization import QUANTIZATION_LAYOUT_RULES, QUANTIZATION_RULES, TRITON_RULES
from titan_exp.rules.rule import Rule, find_violations
from titan_exp.rules.training import MODE_RULES, RAMP_LAYOUT_RULES, RAMP_RULES, TRAINING_LAYOUT_RULES, TRAINING_RULES

RULES: tuple[Rule, ...] = (
    *PATH_RULES,
    *TRAINING_RULES,
    *RAMP_RULES,
    *MODE_RULES,
    *MODEL_RULES,
    *QUANTIZATION_RULES,
    *TRITON_RULES,
    *RECOMPUTE_RULES,
    *GRAPH_RULES,
    *TENSOR_RULES,
    *CONTEXT_RULES,
    *PARAMETRIZATION_RULES,
    *PARAMETER_RULES,
    *CLIP_RULES,
    *pipeline_parallel.EXPERT_RULES,
    *pipeline_parallel.PIPELINE_RULES,
    *NAME_RULES,
    *DATA_RULES,
    *STORE_RULES,
    *EVALUATION_RULES,
    *checkpoint.CHECKPOINT_RULES,
    *checkpoint.PARENT_RULES,
    *DEGREE_RULES,
    *CLUSTER_RULES,
)
"""Core's rules checked even if the layout cannot be resolved; `dp_shard` is 1 then."""

BEGINNING_RULES: tuple[Rule, ...] = (*checkpoint.CHECKPOINT_BEGINNING_RULES, *checkpoint.PARENT_BEGINNING_RULES)
"""Rules about inputs of a run's first start, skipped on resume."""

LAYOUT_RULES: tuple[Rule, ...] = (
    *TRAINING_LAYOUT_RULES,
    *RAMP_LAYOUT_RULES,
    *QUANTIZATION_LAYOUT_RULES,
    *GRAPH_LAYOUT_RULES,
    *pipeline_parallel.EXPERT_LAYOUT_RULES,
    *pipeline_parallel.PIPELINE_LAYOUT_RULES,
    *CLUSTER_LAYOUT_RULES,
)
"""Core's rules that need a resolved layout."""


@cache
def always_rules() -> tuple[Rule, ...]:
    """`RULES`, then those of extensions, whose modules import this package: they are imported by the first check."""
    return (*RULES, *(rule for module in loaded("rules") for rule in module.RULES))


@cache
def layout_rules() -> tuple[Rule, ...]:
    """`LAYOUT_RULES`, then those of extensions."""
    return (*LAYOUT_RULES, *(rule for module in loaded("rules") for rule in getattr(module, "LAYOUT_RULES", ())))


def every_rule() -> tuple[Rule, ...]:
    """All rules of a run that is not launched, in the order of their violations."""
    return (*always_rules(), *layout_rules(), *BEGINNING_RULES)


HasBegun = Callable[[Experiment], bool]
"""True if a run, with a resolved layout, has a checkpoint to resume from."""


def check(experiment: Experiment, has_begun: HasBegun | None = None) -> Experiment:
    """Check an experiment against all rules and return it unchanged. The layout may be unresolved. `has_begun` is None
    for a run that is not launched, as in a prediction. Raises UserError with every violation."""
    found = violations(experiment, has_begun)
    if found:
        raise UserError("This run cannot start.", found)
    return experiment


def violations(experiment: Experiment, has_begun: HasBegun | None = None) -> list[Violation]:
    """All rule violations of an experiment on this machine."""
    if unreadable := list(pipeline_parallel.schedule_is_known(experiment.parallelism)):
        # Others read the schedule: they are checked with one that every layout has.
        parallelism = replace(experiment.parallelism, pp_schedule="1F1B")
        return [*unreadable, *violations(replace(experiment, parallelism=parallelism), has_begun)]
    always, beginning = always_rules(), BEGINNING_RULES
    if has_begun is not None:
        always, beginning = (*PATH_LAUNCH_RULES, *always), (*BEGINNING_RULES, *LARGE_TEXT_LAUNCH_RULES)
    try:
        resolved = resolve_layout(experiment, offered_devices(experiment.cluster))
    except UserError as error:
        single = resolve_layout(replace(experiment, parallelism=replace(experiment.parallelism, dp_shard=1)), 1)
        return [*error.violations, *find_violations((*always, *beginning), single)]
    found = find_violations((*always, *layout_rules()), resolved)
    missing = find_violations(beginning, resolved)
    return found if missing and has_begun is not None and has_begun(resolved) else [*found, *missing]
