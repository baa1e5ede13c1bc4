"""Composition from overrides outside the command line, and the resolvers of interpolations."""

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import resources
from inspect import signature
from math import isfinite
from pathlib import Path
from typing import Any

import yaml
from hydra import __version__, initialize_config_dir
from hydra import compose as hydra_compose
from hydra._internal.core_plugins import file_config_source, importlib_resources_config_source
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.global_hydra import GlobalHydra
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf

from titan_exp.config import extension
from titan_exp.config.command_line.options import Arguments
from titan_exp.config.errors.user_error import UserError, divisors, listed, nearest_numbers, shown
from titan_exp.config.extension import CONF_DIR, CONFIG_NAME, added_keys, extensions
from titan_exp.config.foreign_file import StrictLoader, load_node, read_file, switch_words
from titan_exp.config.secrets import register_secret_resolvers


class _OwnLoader(ConfigSource):
    def _load(self, file: Any, config_path: str) -> ConfigResult:
        if not file.is_file():
            raise ConfigLoadError(f"Config not found : {file}")
        content = read_file(file) if isinstance(file, Path) else file.read_bytes()
        config, header = pickle.loads(_parsed(str(file), content, config_path, tuple(extensions())))
        return ConfigResult(config=config, path=self.full_path(), provider=self.provider, header=header)


class FileConfigSource(_OwnLoader, file_config_source.FileConfigSource):
    """Files in a folder."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Read an option file."""
        return self._load(Path(self.path, self._normalize_file_name(config_path)), config_path)


class ImportlibResourcesConfigSource(_OwnLoader, importlib_resources_config_source.ImportlibResourcesConfigSource):
    """Files in a package."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Read an option file."""
        place = resources.files(self.path).joinpath(self._normalize_file_name(config_path))
        return self._load(place, config_path)


@lru_cache(maxsize=1024)
def _parsed(file: str, content: bytes, config_path: str, _: tuple[str, ...]) -> bytes:
    """Configuration of an option file and its header, pickled: reading them back is nine times as fast as making them,
    and a composition changes its own."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise yaml.YAMLError("it is not UTF-8 text") from error
    header = ConfigSource._get_header_dict(text[:512])
    node, values = load_node(text, StrictLoader)
    if values is not None and not isinstance(values, (dict, list, str)):
        raise OSError(f"{file} holds the single value {values} instead of lines of `key: value`")
    if node is not None:
        is_global = header.get("package") == "_global_" or "/" not in config_path
        _refuse_untyped(file, node, "" if is_global else config_path.rpartition("/")[0].replace("/", "."))
    values = {} if values is None else values
    if isinstance(values, dict) and header.get("package") != "_global_":
        values = _with_extensions(file, config_path, values)
    return pickle.dumps((OmegaConf.create(values), header))


def use_own_loader() -> None:
    """Make Hydra read files through these classes; idempotent. Hydra keeps a class that has the name of its own."""
    SourcesRegistry.instance().types.update(file=FileConfigSource, pkg=ImportlibResourcesConfigSource)


def _with_extensions(file: str, config_path: str, values: dict[str, Any]) -> dict[str, Any]:
    """Values of an option with the keys that extensions add to its group, and the primary configuration with a line for
    each group of theirs. An option that begins with another has those of that one."""
    group = config_path.rpartition("/")[0]
    if group or file != str(extension.CONF_DIR / f"{CONFIG_NAME}.yaml"):
        return values if "defaults" in values else {**values, **added_keys(group), **values}
    lines = values["defaults"]
    known = {*values, *(name for line in lines if isinstance(line, dict) for name in line)}
    options = {name: extension.shipped_options(name) for name in extension.added_groups() if name not in known}
    plain = {name: added_keys(name) for name, found in options.items() if not found}
    chosen = [{name: "none" if "none" in found else "default"} for name, found in options.items() if found]
    at = lines.index("_self_")
    return {**values, **plain, "defaults": [*lines[:at], *chosen, *lines[at:]]}


def _refuse_untyped(file: str, node: yaml.Node, group: str) -> None:
    """Raise UserError at `on`, `off`, `yes` and `no` as the value of a key without a type: YAML 1.1 reads booleans,
    YAML 1.2 and the command line read text."""
    from titan_exp.config.schema.schema import annotation_of

    for path, word in switch_words(node):
        key = ".".join(filter(None, [group, *path]))
        if key.partition(".")[0] != "hydra" and annotation_of(key) is None:
            line, meant = word.start_mark.line + 1, str(word.value.lower() in ("on", "yes")).lower()
            raise UserError(
                f"{file}, line {line}: {path[-1] if path else ''}: YAML 1.1 reads {word.value} as a boolean, YAML 1.2 "
                f"and the command line as text. Write {meant}, or '{word.value}' in quotes if you mean the text."
            )


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
        raise ValueError(f"{divisor} does not divide {dividend} (nearest: {near})")
    return int(dividend) // int(divisor)


def larger_of(one: float, other: float) -> int:
    """Larger of two whole numbers."""
    return int(max(one, other))


def register_resolvers() -> None:
    """Register the resolvers, and the loader of YAML; idempotent."""
    for function in (share_of, rest_of, quotient, larger_of):
        _register(function.__name__, _of_numbers(function), replace=True)
    for name, path in extension.provided("resolvers").items():
        # An extension's function is imported when an interpolation calls it.
        _register(name, lambda *arguments, path=path: extension.load(path)(*arguments), replace=True)
    register_secret_resolvers(_register)
    use_own_loader()


# OmegaConf 2.4 gives the function the name of an older one, which took other arguments.
_is_renamed = "replace" in signature(OmegaConf.register_resolver).parameters
_register: Any = OmegaConf.register_resolver if _is_renamed else OmegaConf.register_new_resolver


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

OWN_FILE = ["hydra.run.dir=.", "hydra.sweep.dir=.", "hydra.sweep.subdir=.", "hydra.output_subdir=null"]
OWN_FILE += ["hydra.job.chdir=false", "hydra/job_logging=none", "hydra/hydra_logging=none", "hydra/sweeper=titan_exp"]
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
