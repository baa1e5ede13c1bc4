"""Rules between fields: what no single field can tell. All of them are asked, and every violation is reported at once.

A rule is a function from an experiment whose layout is resolved to the violations that it finds.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.machine.devices import offered_devices
from titan_exp.rules import (
    attention,
    batch,
    checkpoint,
    cluster,
    context_parallel,
    cuda_graphs,
    data,
    degrees,
    import_paths,
    model_shape,
    paths,
    pipeline_parallel,
    precision,
    quantization,
    recompute,
    schedule,
    tensor_parallel,
    token_store,
    triton,
)

Rule = Callable[[Experiment], Iterator[Violation]]

RULES: tuple[Rule, ...] = (
    *paths.RULES,
    *schedule.RULES,
    *model_shape.RULES,
    *attention.RULES,
    *precision.RULES,
    *quantization.RULES,
    *triton.RULES,
    *recompute.RULES,
    *cuda_graphs.RULES,
    *tensor_parallel.RULES,
    *context_parallel.RULES,
    *pipeline_parallel.RULES,
    *import_paths.RULES,
    *data.RULES,
    *token_store.RULES,
    *checkpoint.RULES,
    *degrees.RULES,
    *cluster.RULES,
)
"""Rules that hold in every layout, and those about the layout itself."""

LAYOUT_RULES: tuple[Rule, ...] = (
    *batch.RULES,
    *pipeline_parallel.LAYOUT_RULES,
    *cluster.LAYOUT_RULES,
    *quantization.LAYOUT_RULES,
    *cuda_graphs.LAYOUT_RULES,
)
"""Rules that divide something by the layout, asked where there is one."""


def _begins(_: Experiment) -> bool:
    return False


def check(experiment: Experiment, has_begun: Callable[[Experiment], bool] = _begins) -> Experiment:
    """Return the experiment as it is, where it keeps every rule.

    Args:
        experiment: what to run.
        has_begun: whether the run of an experiment, its layout resolved, has a checkpoint to continue from.

    Raises:
        UserError: with every violation.
    """
    found = violations(experiment, has_begun)
    if found:
        raise UserError("This run cannot be started.", found)
    return experiment


def violations(experiment: Experiment, has_begun: Callable[[Experiment], bool] = _begins) -> list[Violation]:
    """Everything about an experiment that cannot be, on this machine."""
    try:
        resolved = resolve_layout(experiment, offered_devices(experiment.cluster))
    except UserError as error:
        single = resolve_layout(replace(experiment, parallelism=replace(experiment.parallelism, dp_shard=1)), 1)
        return [*error.violations, *_asked((*RULES, *checkpoint.BEGINNING_RULES), single)]
    found = _asked((*RULES, *LAYOUT_RULES), resolved)
    missing = _asked(checkpoint.BEGINNING_RULES, resolved)
    return [*found, *missing] if missing and not has_begun(resolved) else found


def _asked(rules: tuple[Rule, ...], experiment: Experiment) -> list[Violation]:
    return [violation for rule in rules for violation in rule(experiment)]
