"""Temporary changes of torch: monkey patches, used only if it has no hook, and settings of its compiler.

Code of this package is never patched: it has extension points (`StepObserver`, `P2PTransport`, `Hardware`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch._dynamo.config as dynamo
import torch._functorch.config as functorch
import torch._inductor.config as inductor

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


@contextmanager
def restored_compiler_settings() -> Iterator[None]:
    """Restore the compiler's settings at the end of the `with` block.

    They are the process's: a run's memory budget or rounding would decide how later runs are compiled.
    """
    originals: list[tuple[Any, dict[str, Any]]] = [
        (settings, settings.get_config_copy()) for settings in (dynamo, functorch, inductor)
    ]
    try:
        yield
    finally:
        for settings, values in originals:
            for name, value in settings.get_config_copy().items():
                if value != values[name]:
                    setattr(settings, name, values[name])
