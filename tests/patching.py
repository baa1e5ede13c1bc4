"""Checked replacement of attributes, for mutations and instruments that tests apply in rank processes."""

import pkgutil
from collections.abc import Callable
from typing import Any


def patch(target: str, make: Callable[[Any], Any]) -> None:
    """Replace `package.module.attribute` or `package.module.Class.attribute` in this process, for good.

    `make` gets the original and returns the replacement.

    Raises:
        AttributeError: there is no such attribute, so that the replacement would have no effect.
    """
    owner_name, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    setattr(owner, name, make(getattr(owner, name)))
