"""Composition from overrides outside the command line, its resolvers, and interpolation key by key."""

import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from math import isfinite
from pathlib import Path
from typing import Any

from hydra import __version__, initialize_config_dir
from hydra import compose as hydra_compose
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from titan_exp.config.command_line.options import Arguments
from titan_exp.config.errors.user_error import Violation, divisors, listed, nearest_numbers, shown
from titan_exp.config.extension import CONF_DIR, CONFIG_NAME, load, provided
from titan_exp.config.hydra.config_sources import use_own_loader
from titan_exp.config.schema.identity_keys import is_among
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


_MISSING = object()


class UnreadableSourceError(ValueError):
    """Failure of a resolver that its first key explains, such as the path of a file that it reads."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy
        """Values that would work."""


@dataclass(frozen=True)
class Uncomputed:
    """Key whose value could not be computed."""

    violation: Violation
    """Violation to report."""
    sources: tuple[str, ...] = ()
    """Keys read by its interpolation; their violations are the cause."""
    cause: Violation | None = None
    """Violation of such a key, to report instead."""


def resolve(cfg: DictConfig) -> tuple[dict[str, Any], list[Uncomputed]]:
    """Plain values of a configuration without Hydra's own node, and the keys whose values could not be computed."""
    uncomputed: list[Uncomputed] = []
    keys = [key for key in cfg if key != "hydra"]
    pairs = [(str(key), _value(cfg, key, str(key), uncomputed)) for key in keys]
    return {key: value for key, value in pairs if value is not _MISSING}, uncomputed


def consequences(cfg: DictConfig, faults: Collection[str]) -> set[str]:
    """Keys whose interpolations read a key or a group with a fault, also by way of others."""
    sources = dict(_interpolated(cfg, ""))
    found: set[str] = set()
    while (
        more := {key for key, read in sources.items() if any(is_among(one, {*faults, *found}) for one in read)} - found
    ):
        found |= more
    return found


def _interpolated(node: Any, group: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Keys with an interpolation, and the keys that it reads."""
    for key in node:
        field = f"{group}.{key}" if group else str(key)
        if OmegaConf.is_interpolation(node, key):
            yield field, tuple(_sources(str(node._get_node(key)._value()), group))
        elif not OmegaConf.is_missing(node, key) and isinstance(node[key], DictConfig) and field != "hydra":
            yield from _interpolated(node[key], field)


def _value(node: Any, key: Any, field: str, uncomputed: list[Uncomputed]) -> Any:
    if OmegaConf.is_missing(node, key):
        uncomputed.append(Uncomputed(Violation(field, "???", "this key has no value yet", f"give it one: {field}=...")))
        return _MISSING
    try:
        value = node[key]
    except OmegaConfBaseException as error:
        uncomputed.append(_failure(node, key, field, error))
        return _MISSING
    if isinstance(value, DictConfig):
        pairs = [(str(inner), _value(value, inner, f"{field}.{inner}", uncomputed)) for inner in value]
        return {inner: part for inner, part in pairs if part is not _MISSING}
    if isinstance(value, ListConfig):
        parts = [_value(value, index, f"{field}[{index}]", uncomputed) for index in range(len(value))]
        return [part for part in parts if part is not _MISSING]
    return value


def _failure(node: Any, key: Any, field: str, error: Exception) -> Uncomputed:
    raw = OmegaConf.to_container(node, resolve=False)[key]  # type: ignore[index, call-overload]
    message = str(error).splitlines()[0].partition("while resolving interpolation: ")
    sources = tuple(_sources(str(raw), field.rpartition(".")[0]))
    remedy = f"give {field} a value of its own" + (f", or change {listed(sources)}" if sources else "")
    violation = Violation(field, raw, f"it cannot be computed: {message[2] or message[0]}", remedy)
    unreadable = _unreadable_source(error)
    if unreadable is None:
        return Uncomputed(violation, sources)
    value = OmegaConf.to_container(node, resolve=False)[sources[0].rpartition(".")[2]]  # type: ignore[index, call-overload]
    return Uncomputed(violation, sources, Violation(sources[0], value, str(unreadable), unreadable.remedy))


def _unreadable_source(error: BaseException | None) -> UnreadableSourceError | None:
    """The resolver's own error, around which OmegaConf raises others."""
    while error is not None and not isinstance(error, UnreadableSourceError):
        error = error.__context__
    return error


def _sources(text: str, group: str) -> Iterator[str]:
    for name in re.findall(r"\$\{(\.?\w[\w.]*)\}", text):
        yield f"{group}{name}" if name.startswith(".") else name
