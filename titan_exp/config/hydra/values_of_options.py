"""Options of groups beside a primary configuration without groups, such as a run's `config.yaml`: the values that they
have, in place of the run's."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from titan_exp.config.errors.user_error import UserError, shown
from titan_exp.config.hydra.compose import compose, shipped_options
from titan_exp.config.hydra.nondefault import quoted
from titan_exp.config.paths.yaml_file import read_yaml
from titan_exp.config.schema.config_diff import flatten


def with_values(overrides: Sequence[str], primary: Path) -> list[str]:
    """Overrides with `GROUP=OPTION` replaced by the option's keys, if the primary configuration has plain values for
    that group and no defaults list. Each key is an override of its own, so that those that follow may set it."""
    try:
        values = read_yaml(primary, "a configuration")
    except UserError:
        return list(overrides)  # Hydra says what is wrong
    if "defaults" in values:
        return list(overrides)
    return [word for override in overrides for word in _values(override, values)]


def _values(override: str, values: dict[object, object]) -> Iterator[str]:
    group, _, option = override.partition("=")
    if not isinstance(values.get(group), dict) or option not in shipped_options(group):
        yield override
        return
    try:
        OverridesParser.create().parse_override(override)
        found = OmegaConf.to_container(compose([override])[group], resolve=False)
    except HydraException:
        yield override
        return
    assert isinstance(found, dict)
    yield f"~{group}"
    yield from (f"+{key}={shown(value, quoted)}" for key, value in flatten({group: found}).items())
