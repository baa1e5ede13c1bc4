"""torchft: version check, and its compiled module. Imports no torch."""

import importlib.metadata
import importlib.util
from functools import cache
from importlib.machinery import PathFinder
from typing import Any

TORCHFT = "0.2.0"
"""Version whose requests the trainer speaks. They change between versions; lighthouse and groups need the same."""


def torchft_version() -> str | None:
    """Version of the installed torchft; None without one."""
    try:
        return importlib.metadata.version("torchft")
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def torchft_extension() -> Any:
    """torchft's compiled module: servers and clients. Its package would import torch and telemetry for seconds."""
    package = importlib.util.find_spec("torchft")
    assert package is not None, "checked by the rules"
    spec = PathFinder.find_spec("_torchft", list(package.submodule_search_locations or ()))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
