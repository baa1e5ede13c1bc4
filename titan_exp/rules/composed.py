"""Composed configurations: all faults that do not depend on each other are found together.

Overrides are named before values are typed, and values are typed before rules are checked. Each stage also passes on
what is not at fault, with gaps in the place of what is: a rule that reads a gap is left out.
"""

import os
import re
from contextlib import suppress
from dataclasses import replace

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from titan_exp.config.command_line.options import Arguments
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.parallelism import ParallelismConfig
from titan_exp.config.hydra.config_groups import groups_for
from titan_exp.config.schema.schema import hints
from titan_exp.config.schema.typed_config import GapError, readable_part, to_experiment, with_gaps
from titan_exp.config.secrets import SHAPES, URL_USER, secret_values
from titan_exp.rules import HasBegun, always_rules, violations
from titan_exp.rules.rule import find_violations


def read_experiment(cfg: DictConfig, has_begun: HasBegun | None = None) -> Experiment:
    """Convert a composed configuration like `to_experiment`, which is not checked yet. The refusal of wrong values also
    lists what rules find that read none of them."""
    try:
        return to_experiment(cfg)
    except UserError as error:
        if not error.violations:
            raise
        message = str(error).partition("\n")[0]
        raise UserError(message, [*error.violations, *_beside_gaps(readable_part(cfg)[1], has_begun)]) from error


def with_other_faults(error: UserError, arguments: Arguments) -> UserError:
    """Refusal of overrides, with the faults in groups of which no override is refused or swept. An override of no known
    group may have meant any, so that the others are not judged."""
    faults = {_group_of(violation.field) for violation in error.violations}
    for text in arguments.overrides:
        with suppress(HydraException):
            faults |= {_group_of(text)} if OverridesParser.create().parse_override(text).is_sweep_override() else set()
    if not error.violations or None in faults:
        return error
    try:
        with groups_for(arguments) as groups:
            composed = groups.compose([text for text in arguments.overrides if _group_of(text) not in faults])
        typed, readable = readable_part(composed, [name for name in faults if name is not None])
    except (UserError, HydraException, OmegaConfBaseException):
        return error
    others = [*typed, *_beside_gaps(readable, lambda _: True)]
    return UserError(str(error).partition("\n")[0], [*error.violations, *others])


def _group_of(text: str) -> str | None:
    """Group of a key or override; None for none of a run's, and for a preset of several."""
    key = text.lstrip("+~").partition("=")[0].partition("@")[0]
    group = re.split("[./]", key)[0]
    return group if group in hints(Experiment) and key != "experiment" else None


def _beside_gaps(experiment: Experiment, has_begun: HasBegun | None) -> list[Violation]:
    try:
        found = violations(experiment, has_begun)
    except GapError:  # in the layout, on which `compile.enabled=auto` depends
        layout = {"parallelism": with_gaps(ParallelismConfig, {})}
        if vars(experiment.compile).get("enabled") == "auto":
            layout["compile"] = replace(experiment.compile, enabled=False)
        found = find_violations(always_rules(), replace(experiment, **layout))
    # Credentials are refused before the rules are checked, which quote values.
    secrets, texts = secret_values(os.environ.items()), [(violation, str(violation)) for violation in found]
    plain = [(one, text) for one, text in texts if not (SHAPES.search(text) or URL_USER.search(text))]
    return [one for one, text in plain if not any(secret in text for secret in secrets)]
