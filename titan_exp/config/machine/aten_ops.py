"""Names of torch's operators, known without importing torch: read from the list that comes with it."""

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
    """An entry of `activation_checkpoint.save`, read: `aten.mm/2` keeps every second call, the first among them."""

    operator: str
    """`namespace.name` or `namespace.name.overload`."""
    every: int
    """Interval of saved calls in a block, the first included."""


def read_entry(entry: str) -> Kept | None:
    """Read one entry; None where it has not the form `namespace.name[.overload][/number]`."""
    found = re.fullmatch(r"(\w+\.\w+(?:\.\w+)?)(?:/([1-9]\d*))?", entry)
    return Kept(found[1], int(found[2] or 1)) if found else None


def known_operators(namespace: str) -> tuple[str, ...]:
    """Every operator of a namespace, without it; empty where that cannot be known without torch."""
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
