"""ATen operator names, read from torch's `native_functions.yaml` without importing torch."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

COLLECTIVES = (
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "reduce_scatter_tensor",
    "wait_tensor",
)
"""Operators of the namespace `_c10d_functional`."""


class Kept(NamedTuple):
    """Entry of `activation_checkpoint.save`: `aten.mm/2` saves every second call, the first included."""

    operator: str
    """`namespace.name` or `namespace.name.overload`."""
    every: int
    """Interval of saved calls in a block."""


def read_entry(entry: str) -> Kept | None:
    """Parse an entry `namespace.name[.overload][/number]`; None if it has another form."""
    found = re.fullmatch(r"(\w+\.\w+(?:\.\w+)?)(?:/([1-9]\d*))?", entry)
    return Kept(found[1], int(found[2] or 1)) if found else None


def known_operators(namespace: str) -> tuple[str, ...]:
    """Operator names of a namespace, unqualified; empty if unknown without torch."""
    if namespace == "_c10d_functional":
        return COLLECTIVES
    return _aten_operators() if namespace == "aten" else ()


@cache
def _aten_operators() -> tuple[str, ...]:
    spec = find_spec("torchgen")
    if spec is None or spec.origin is None:
        return ()
    path = Path(spec.origin).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    if not path.is_file():
        return ()
    return tuple(dict.fromkeys(re.findall(r"^- func: (\w+)", path.read_text(), flags=re.MULTILINE)))
