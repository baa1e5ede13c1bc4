"""Cross-field validation rules, checked before launch; all violations are reported together."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from titan_exp.config.devices import offered_devices
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.extension import loaded
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.rules import checkpoint, cluster, compile, data, mesh, model, pipeline_parallel, quantization, training
from titan_exp.rules.rule import Rule, find_violations


@cache
def always_rules() -> tuple[Rule, ...]:
    """Rules checked even if the layout cannot be resolved; `dp_shard` is 1 then. Modules of extensions import this
    package, so that the first check imports them."""
    first = (*cluster.PATH_RULES, *training.RULES, *model.MODEL_RULES, *quantization.RULES, *compile.RULES)
    degrees = (*mesh.TENSOR_RULES, *mesh.CONTEXT_RULES, *model.PARAMETER_RULES, *pipeline_parallel.RULES)
    last = (*cluster.NAME_RULES, *data.RULES, *checkpoint.RULES, *mesh.DEGREE_RULES, *cluster.RULES)
    return (*first, *degrees, *last, *(rule for module in loaded("rules") for rule in module.RULES))


@cache
def layout_rules() -> tuple[Rule, ...]:
    """Rules that need a resolved layout, those of extensions last."""
    modules = (training, quantization, compile, pipeline_parallel, cluster, *loaded("rules"))
    return tuple(rule for module in modules for rule in getattr(module, "LAYOUT_RULES", ()))


def every_rule() -> tuple[Rule, ...]:
    """All rules of a run that is not launched, in the order of their violations."""
    return (*always_rules(), *layout_rules(), *checkpoint.BEGINNING_RULES)


HasBegun = Callable[[Experiment], bool]  # True if a run, with a resolved layout, has a checkpoint to resume from


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
    always, beginning = always_rules(), checkpoint.BEGINNING_RULES
    if has_begun is not None:
        always, beginning = (*cluster.PATH_LAUNCH_RULES, *always), (*beginning, *data.LARGE_TEXT_LAUNCH_RULES)
    try:
        resolved = resolve_layout(experiment, offered_devices(experiment.cluster))
    except UserError as error:
        single = resolve_layout(replace(experiment, parallelism=replace(experiment.parallelism, dp_shard=1)), 1)
        return [*error.violations, *find_violations((*always, *beginning), single)]
    found = find_violations((*always, *layout_rules()), resolved)
    missing = find_violations(beginning, resolved)
    return found if missing and has_begun is not None and has_begun(resolved) else [*found, *missing]
