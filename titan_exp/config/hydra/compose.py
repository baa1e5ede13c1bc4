"""Composition from overrides outside the command line, and the resolvers of interpolations."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from math import isfinite
from pathlib import Path
from typing import Any

from hydra import __version__, initialize_config_dir
from hydra import compose as hydra_compose
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from titan_exp.config.command_line.options import Arguments
from titan_exp.config.errors.user_error import divisors, listed, nearest_numbers, shown
from titan_exp.config.extension import CONF_DIR, CONFIG_NAME, load, provided
from titan_exp.config.hydra.config_sources import use_own_loader
from titan_exp.config.secrets import register_secret_resolvers


def share_of(fraction: float, whole: float) -> int:
    """Rounded fraction of a whole number: at least 1 unless the fraction is 0, at most the whole."""
    return min(max(round(fraction * whole), 1 if fraction else 0), int(whole))


def rest_of(whole: float, part: float) -> int:
    """Difference of a whole and a part, at least 0."""
    return max(int(whole) - int(part), 0)


def quotient(dividend: int, divisor: int) -> int:
    """Exact division; a ValueError names the nearest divisors."""
    if divisor == 0 or dividend % divisor:
        near = listed(nearest_numbers(divisor, divisors(abs(int(dividend))), 2))
        raise ValueError(f"{dividend} is not a multiple of {divisor}, but of {near}")
    return int(dividend) // int(divisor)


def larger_of(one: float, other: float) -> int:
    """Larger of two whole numbers."""
    return int(max(one, other))


def register_resolvers() -> None:
    """Register the resolvers, and the loader of YAML; idempotent."""
    for function in (share_of, rest_of, quotient, larger_of):
        _register(function.__name__, _of_numbers(function), replace=True)
    for name, path in provided("resolvers").items():
        _register(name, partial(_call, path), replace=True)
    register_secret_resolvers(_register)
    use_own_loader()


# OmegaConf 2.4 gives the function the name of an older one, which took other arguments.
_is_renamed = "replace" in signature(OmegaConf.register_resolver).parameters
_register: Any = OmegaConf.register_resolver if _is_renamed else OmegaConf.register_new_resolver


def _call(path: str, *arguments: object) -> Any:
    """Value of an extension's resolver, which is imported when an interpolation calls it."""
    return load(path)(*arguments)


def _of_numbers(function: Callable[..., int]) -> Callable[..., int]:
    """Resolver that refuses other arguments than two finite numbers. Digits that are text (010, which YAML and Hydra
    do not read as a number) count as for the key itself."""

    def resolver(*found: object) -> int:
        values = [int(one) if isinstance(one, str) and one.isascii() and one.isdigit() else one for one in found]
        if len(values) != 2 or not all(isinstance(value, int | float) and isfinite(value) for value in values):
            raise ValueError(
                f"{function.__name__} takes two numbers, not {listed(map(shown, values), 'and') or 'none'}"
            )
        return function(*values)

    return resolver


HYDRA_VERSION: dict[str, Any] = {"version_base": "1.3"} if __version__.startswith("1.3") else {}
"""Version argument of Hydra's entry points: required by 1.3, rejected by 1.4."""

OWN_FILE = [
    *(
        "hydra.run.dir=.",
        "hydra.sweep.dir=.",
        "hydra.sweep.subdir=.",
        "hydra.output_subdir=null",
        "hydra.job.chdir=false",
    ),
    *("hydra/job_logging=none", "hydra/hydra_logging=none", "hydra/sweeper=titan_exp"),
]
"""Hydra settings of `conf/config.yaml`, for other primary files (`--config-path`) such as a run's."""


def primary_file(arguments: Arguments) -> Path:
    """Primary configuration: the file of `--config-path` and `--config-name`, else `conf/config.yaml`."""
    folder = arguments.value_of("--config-path", "-cp") or CONF_DIR
    name = arguments.value_of("--config-name", "-cn") or CONFIG_NAME
    return Path(folder).absolute() / f"{name.removesuffix('.yaml')}.yaml"


def compose(overrides: Sequence[str] = ()) -> DictConfig:
    """Compose the configuration like `titan-exp train`, without Hydra's own node."""
    register_resolvers()
    with config_folder():
        return hydra_compose(CONFIG_NAME, [*default_overrides(), *overrides])


@contextmanager
def config_folder() -> Iterator[None]:
    """Initialize Hydra with `CONF_DIR`, also inside a verb that Hydra has started."""
    hydra = GlobalHydra.instance()
    before, hydra.hydra = hydra.hydra, None
    try:
        with initialize_config_dir(str(CONF_DIR), **HYDRA_VERSION):
            yield
    finally:
        GlobalHydra.instance().hydra = before  # leaving Hydra's context has replaced the instance


def default_overrides() -> list[str]:
    """Overrides from the environment: `TITAN_EXP_LOCAL=none` omits `conf/local/default.yaml`."""
    leave_out = os.environ.get("TITAN_EXP_LOCAL") == "none" and (CONF_DIR / "local").is_dir()
    return ["~local@_global_"] if leave_out else []
