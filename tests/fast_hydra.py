"""Hydra and OmegaConf without repeated work: much of the CPU time of tests of the command line is composition.

The composed configurations are the same; `tests/test_fast_hydra.py` compares them.
"""

import copy
import functools
import os
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import hydra
from hydra._internal import defaults_list as hydra_defaults
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra.core.default_element import GroupDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from omegaconf import base as omegaconf_base
from omegaconf.base import Metadata

LOAD, MERGE = ConfigRepository.load_config, ConfigLoaderImpl._compose_config_from_defaults_list
PARSE, CACHE = OverridesParser.parse_rule, CachingConfigRepository.__init__
"""Hydra's own functions."""


def install() -> None:
    """Parse every file, override and interpolation once, merge every list of files once, copy metadata without
    reflection, index choices only for interpolated defaults. Another Hydra than 1.3 is left as it is."""
    if not hydra.__version__.startswith("1.3") or CachingConfigRepository.__init__ is _cache_of:
        return
    ConfigRepository.load_config, ConfigLoaderImpl._compose_config_from_defaults_list = _remembered()
    CachingConfigRepository.__init__ = _cache_of  # type: ignore[method-assign]
    OverridesParser.parse_rule = _parsed()
    omegaconf_base.parse = functools.cache(omegaconf_base.parse)
    OmegaConf.load = staticmethod(_Parsed(OmegaConf.load))
    Metadata.__deepcopy__ = _copy_metadata  # type: ignore[attr-defined]
    hydra_defaults._create_interpolation_map = _Choices(hydra_defaults._create_interpolation_map)


def _remembered() -> tuple[Any, Any]:
    """Hydra's loading and merging of option files with caches by places and states of files."""
    loaded_once, merged_once = dict[Any, Any](), dict[Any, bytes]()

    def load(repository: ConfigRepository, config_path: str) -> Any:
        source = repository._find_object_source(config_path, ObjectType.CONFIG)
        key = None if source is None else _state(f"{source.scheme()}://{source.path}", config_path)
        if key is None:
            return LOAD(repository, config_path)
        if key not in loaded_once:
            loaded_once[key] = LOAD(repository, config_path)
        return loaded_once[key]

    def merge(loader: ConfigLoaderImpl, defaults: Any, repo: Any) -> Any:
        places = [(repo.load_config(entry.config_path), entry) for entry in defaults]
        states = [_state(loaded.path, entry.config_path) for loaded, entry in places if loaded is not None]
        key = (*((entry.package, entry.primary) for entry in defaults), *states)
        if key in merged_once:
            return pickle.loads(merged_once[key])
        repo.cache = copy.deepcopy(repo.cache)  # merging changes them
        merged = MERGE(loader, defaults, repo)
        if None not in states:
            merged_once[key] = pickle.dumps(merged)
        return merged

    return load, merge


def _cache_of(cache: Any, delegate: Any) -> None:
    """Copy of a repository whose list of sources may be replaced; they are not changed."""
    cache.delegate, cache.cache = copy.copy(delegate), {}


def _parsed() -> Any:
    """Hydra's parser of overrides with a cache by text."""
    once = functools.cache(lambda s, rule_name: pickle.dumps(PARSE(OverridesParser.create(), s, rule_name)))
    return lambda self, s, rule_name: pickle.loads(once(s, rule_name))


def _state(folder: str, name: str) -> tuple[Any, ...] | None:
    """Place of an option with inode, time and size of its file; None if it is in a package that may change."""
    if not folder.startswith("file://"):
        return None if folder.startswith("pkg://") and folder != "pkg://hydra.conf" else (folder, name)
    status = os.stat(Path(folder.removeprefix("file://"), f"{name.removesuffix('.yaml')}.yaml"))
    return folder, name, status.st_ino, status.st_mtime_ns, status.st_size


class _Parsed:
    """OmegaConf.load with a cache by inode, time and size."""

    def __init__(self, load: Any) -> None:
        self.load, self.parsed = load, dict[tuple[int, int, int], bytes]()

    def __call__(self, file_: Any) -> Any:
        status = os.stat(file_) if isinstance(file_, (str, Path)) else os.fstat(file_.fileno())
        key = (status.st_ino, status.st_mtime_ns, status.st_size)
        if key not in self.parsed:
            self.parsed[key] = pickle.dumps(self.load(file_))
        return pickle.loads(self.parsed[key])


def _copy_metadata(metadata: Metadata, memo: dict[int, Any]) -> Metadata:
    """Copy of a node's metadata: types, keys and booleans, and two dictionaries of them."""
    copy = object.__new__(type(metadata))
    copy.__dict__.update(metadata.__dict__)
    copy.flags = None if metadata.flags is None else dict(metadata.flags)
    copy.resolver_cache = defaultdict(dict, {name: dict(found) for name, found in metadata.resolver_cache.items()})
    return copy


class _Choices:
    """Hydra's index of choices; None where no default of the list has an interpolation, which alone would read it."""

    def __init__(self, index: Any) -> None:
        self.index = index

    def __call__(self, overrides: Any, defaults: Any, self_added: bool) -> Any:
        single = (default for default in defaults if not default.is_self() and not _is_list(default))
        interpolated = any(default.is_interpolation() for default in single)
        return self.index(overrides, defaults, self_added) if interpolated else None


def _is_list(default: Any) -> bool:
    return isinstance(default, GroupDefault) and default.is_options()
