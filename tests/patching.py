"""Checked replacement of attributes, for mutations and instruments that tests apply in rank processes."""

import pkgutil
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def patch(target: str, make: Callable[[Any], Any]) -> None:
    """Replace `package.module.attribute` or `package.module.Class.attribute` in this process, for good.

    `make` gets the original and returns the replacement. Modules of titan_exp that imported it from its own module
    get the replacement too.

    Raises:
        AttributeError: there is no such attribute, so that the replacement would have no effect.
    """
    owner_name, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    original = getattr(owner, name)
    replacement = make(original)
    setattr(owner, name, replacement)
    if not isinstance(owner, ModuleType) or getattr(original, "__module__", None) != owner_name:
        return
    for module in [module for path, module in sys.modules.items() if path.startswith("titan_exp.")]:
        for own_name, value in list(vars(module).items()):
            if value is original:
                setattr(module, own_name, replacement)
