"""Hydra and OmegaConf without repeated work: much of the CPU time of tests of the command line is composition.

The composed configurations are the same; `tests/test_fast_hydra.py` compares them.
"""

import os
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

from hydra._internal import defaults_list as hydra_defaults
from hydra.core.default_element import GroupDefault
from omegaconf import OmegaConf
from omegaconf.base import Metadata


def install() -> None:
    """Parse every YAML file once, copy metadata without reflection, index choices only for interpolated defaults."""
    OmegaConf.load = staticmethod(_Parsed(OmegaConf.load))
    Metadata.__deepcopy__ = _copy_metadata  # type: ignore[attr-defined]
    hydra_defaults._create_interpolation_map = _Choices(hydra_defaults._create_interpolation_map)


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
