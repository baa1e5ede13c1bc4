"""Rules between fields: what no single field can tell. All of them are asked, and every violation is reported at once.

A rule is a function from an experiment whose layout is resolved to the violations that it finds.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from titan_exp.config.errors import UserError, Violation
from titan_exp.config.experiment import Experiment
from titan_exp.config.layout import offered_devices, resolve_layout
from titan_exp.config.rules import (
    attention,
    batch,
    checkpoint,
    cluster,
    context,
    data,
    graphs,
    layout,
    memory,
    names,
    pipeline,
    places,
    precision,
    quantization,
    shape,
    steps,
    tensor,
    tokens,
    triton,
)

Rule = Callable[[Experiment], Iterator[Violation]]

RULES: tuple[Rule, ...] = (
    *places.RULES,
    *steps.RULES,
    *shape.RULES,
    *attention.RULES,
    *precision.RULES,
    *quantization.RULES,
    *triton.RULES,
    *memory.RULES,
    *graphs.RULES,
    *tensor.RULES,
    *context.RULES,
    *pipeline.RULES,
    *names.RULES,
    *data.RULES,
    *tokens.RULES,
    *checkpoint.RULES,
    *layout.RULES,
    *cluster.RULES,
)
"""Rules that hold in every layout, and those about the layout itself."""

LAYOUT_RULES: tuple[Rule, ...] = (
    *batch.RULES,
    *pipeline.LAYOUT_RULES,
    *cluster.LAYOUT_RULES,
    *quantization.LAYOUT_RULES,
    *graphs.LAYOUT_RULES,
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
