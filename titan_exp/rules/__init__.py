"""Cross-field validation rules, checked before launch; all violations are reported together."""

from collections.abc import Callable
from dataclasses import replace

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.extension import extensions, load
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.machine.devices import offered_devices
from titan_exp.rules import (
    checkpoint,
    cluster,
    continue_from,
    cuda_graphs,
    data,
    import_paths,
    large_text,
    model,
    modes,
    parameter_groups,
    parametrization,
    paths,
    qk_clip,
    quantization,
    recompute,
    training,
    triton,
)
from titan_exp.rules.layout import (
    batch_ramp,
    context_parallel,
    degrees,
    expert_parallel,
    pipeline_parallel,
    replica_groups,
    semi_sync,
    tensor_parallel,
)
from titan_exp.rules.layout.pipeline_parallel import schedule_is_known
from titan_exp.rules.rule import Rule, find_violations
from titan_exp.rules.stores import latent_store, token_store

_MODULES = (
    paths,
    training,
    batch_ramp,
    modes,
    model,
    quantization,
    triton,
    recompute,
    cuda_graphs,
    tensor_parallel,
    context_parallel,
)
_MODULES += (
    parametrization,
    parameter_groups,
    qk_clip,
    expert_parallel,
    pipeline_parallel,
    import_paths,
    data,
    token_store,
    latent_store,
    checkpoint,
    continue_from,
    degrees,
    cluster,
    replica_groups,
    semi_sync,
)

_MODULES += tuple(load(one.rules) for one in extensions().values() if one.rules)

RULES: tuple[Rule, ...] = tuple(rule for module in _MODULES for rule in module.RULES)
"""Rules checked even if the layout cannot be resolved; `dp_shard` is 1 then."""

BEGINNING_RULES: tuple[Rule, ...] = (*checkpoint.BEGINNING_RULES, *continue_from.BEGINNING_RULES)
"""Rules about inputs of a run's first start, skipped on resume."""

LAYOUT_RULES: tuple[Rule, ...] = tuple(rule for module in _MODULES for rule in getattr(module, "LAYOUT_RULES", ()))
"""Rules that need a resolved layout."""

EVERY_RULE = (*RULES, *LAYOUT_RULES, *BEGINNING_RULES)
"""All rules of a run that is not launched, in the order of their violations."""

HasBegun = Callable[[Experiment], bool]
"""True if a run, with a resolved layout, has a checkpoint to resume from."""


def check(experiment: Experiment, has_begun: HasBegun | None = None) -> Experiment:
    """Check an experiment against all rules and return it unchanged.

    The layout may be unresolved. `has_begun` is None for a run that is not launched, as in a prediction.

    Raises:
        UserError: with every violation.
    """
    found = violations(experiment, has_begun)
    if found:
        raise UserError("This run cannot be started.", found)
    return experiment


def violations(experiment: Experiment, has_begun: HasBegun | None = None) -> list[Violation]:
    """All rule violations of an experiment on this machine."""
    if unreadable := list(schedule_is_known(experiment.parallelism)):
        # Others read the schedule: they are checked with one that every layout has.
        parallelism = replace(experiment.parallelism, pp_schedule="1F1B")
        return [*unreadable, *violations(replace(experiment, parallelism=parallelism), has_begun)]
    always, beginning = RULES, BEGINNING_RULES
    if has_begun is not None:
        always, beginning = (*paths.LAUNCH_RULES, *RULES), (*BEGINNING_RULES, *large_text.LAUNCH_RULES)
    try:
        resolved = resolve_layout(experiment, offered_devices(experiment.cluster))
    except UserError as error:
        single = resolve_layout(replace(experiment, parallelism=replace(experiment.parallelism, dp_shard=1)), 1)
        return [*error.violations, *find_violations((*always, *beginning), single)]
    found = find_violations((*always, *LAYOUT_RULES), resolved)
    missing = find_violations(beginning, resolved)
    return found if missing and has_begun is not None and has_begun(resolved) else [*found, *missing]
