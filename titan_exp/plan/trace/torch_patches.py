"""Temporary monkey patches of torch, used only if torch has no hook.

Code of this package is never patched: it has extension points (`StepObserver`, `P2PTransport`, `Hardware`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def replaced_attributes(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes of torch's classes and modules for the `with` block: owner, name, replacement."""
    originals = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in replacements]
    try:
        for owner, name, value in replacements:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, original in reversed(originals):
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
