"""Proofs: tests declare by markers what they prove of a model family, and `docs/models.md` is the table of them.

`@pytest.mark.proves(FAMILY, COLUMN, ...)` declares columns; `layout` stands for the axes and
options that a case's parameters name.
`@pytest.mark.counts("total" | "active")` declares that `count` is that of the preset `name`. While a test runs, its
columns are held against what it builds and trains: a test that declares more than it did fails.
"""

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import yaml

from titan_exp.config.extension import shipped_options
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.schema.component import builtin_components

REPOSITORY = Path(__file__).resolve().parents[1]
ROOMS = (
    *("tests/models", "tests/parity", "tests/checkpoint", "tests/inference", "tests/plan"),
    "tests/extensions",
    "tests/config/test_models.py",
)
"""Places of tests with these markers."""
AXES = ("tp", "cp", "pp", "ep")
BUILT = ("logits", "gradients", "import", "export", "generate")
"""Columns whose tests build a model of the family."""
PLANNED = ("predicted", "measured")
"""Parts of the column `plan`: by the planner, and on ranks that run it."""
OPTIONS = {
    "recompute": r"activation_checkpoint=(full|every_n|selective|budget)",
    "compile": r"compile=blocks",
    "fp8": r"quantization=(float8|mxfp8)",
}
"""Columns of options that overrides set."""
COLUMNS = ("counts", *BUILT, *AXES, *OPTIONS, "plan")


class Proof(NamedTuple):
    """One column of a family that one test proves."""

    family: str
    column: str
    where: str
    """`day` or `night` on a CPU, or `GPU`."""


class Count(NamedTuple):
    """Parameters of a preset that a test compares with its spec."""

    preset: str
    kind: str
    parameters: int


class Proofs(NamedTuple):
    """All that the tests declare."""

    proofs: list[Proof]
    counts: list[Count]


COLLECTED = pytest.StashKey[Proofs]()
noted: list[tuple[str, set[str]]] = []
"""Families that a test trained, with axes of more than one rank and options, planned or measured."""


def family_of(preset: str) -> str:
    """Architecture of a preset, as its YAML or one that it extends says."""
    found = _architectures(shipped_options("model")[preset])
    assert found, f"{preset} says no architecture"
    return found[-1]


def _architectures(file: Path) -> list[str]:
    """Architectures that a YAML and those that it extends set, the last one in effect."""
    values, found = yaml.load(file.read_text(), yaml.CSafeLoader), list[str]()
    for entry in values.get("defaults", ()):
        if entry != "_self_":
            found += _architectures(file.parent / f"{entry.partition('@')[0]}.yaml")
    own = values.get("architecture", "???")
    return found if own == "???" else [*found, own]


def published_presets() -> list[str]:
    """Presets of published models."""
    names = [name for name in shipped_options("model") if not name.endswith(("_debug", "_laptop"))]
    return [name for name in names if name != family_of(name)]  # a whole family has no counts


def proves(words: str, *columns: str) -> pytest.MarkDecorator:
    """Marker for a case of these overrides, whose `model=` names the preset; `llama_debug` without one."""
    chosen = re.findall(r"(?<!\S)model=(\w+)", words)
    return pytest.mark.proves(family_of(chosen[-1] if chosen else "llama_debug"), *columns)


def axes_of(words: str) -> set[str]:
    """Axes of more than one rank, and options of `OPTIONS`, in overrides."""
    found = {axis for axis, degree in re.findall(r"parallelism\.(\w+)=(\d+)", words) if int(degree) > 1}
    options = {name for name, pattern in OPTIONS.items() if re.search(rf"(?<!\S){pattern}", words)}
    return (found & {*AXES}) | options


def columns_of(item: pytest.Item) -> Iterator[tuple[str, str]]:
    """Families and columns that a case declares."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}  # type: ignore[attr-defined]
    for mark in item.iter_markers("proves"):
        family, *columns = mark.args
        words = " ".join(value for value in parameters.values() if isinstance(value, str))
        for column in columns:
            if column == "layout":
                yield from ((family, axis) for axis in sorted(axes_of(words)))
            elif column != "fp8" or "nvfp4" not in words:
                yield family, column


def collect(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Read the markers of collected items; those that are skipped or expected to fail prove nothing.

    Raises:
        pytest.UsageError: an unknown family or column, or a place that is none of `ROOMS`.
    """
    found = Proofs([], [])
    for item in items:
        declared, kinds = list(columns_of(item)), [mark.args[0] for mark in item.iter_markers("counts")]
        skipped = item.get_closest_marker("xfail") or (item.get_closest_marker("skip") and not is_marked(item, "slow"))
        if (not declared and not kinds) or skipped:
            continue
        if not item.nodeid.startswith(ROOMS):
            raise pytest.UsageError(f"{item.nodeid} proves something outside of {', '.join(ROOMS)}")
        where = "GPU" if is_marked(item, "cuda") else "night" if is_marked(item, "night") else "day"
        for family, column in declared:
            if family not in builtin_components("model") or column not in COLUMNS[1:]:
                raise pytest.UsageError(f"{item.nodeid} proves {column!r} of {family!r}: no such family or column")
            found.proofs.append(Proof(family, column, where))
        values = item.callspec.params if kinds else {}  # type: ignore[attr-defined]
        found.counts.extend(Count(values["name"], kind, values["count"]) for kind in kinds)
    if path := config.option.proofs:
        Path(path).write_text(json.dumps(found))
    roots = {(config.invocation_params.dir / argument).resolve() for argument in config.args}
    if roots <= {REPOSITORY, REPOSITORY / "tests"} and not config.option.ignore:
        config.stash[COLLECTED] = found


def is_marked(item: pytest.Item, marker: str) -> bool:
    """True if a marker is on the item."""
    return item.get_closest_marker(marker) is not None


def collected(config: pytest.Config, folder: Path) -> Proofs:
    """Proofs of all tests: those of this session, or collected by another if this one runs a few tests only."""
    if COLLECTED in config.stash:
        return config.stash[COLLECTED]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", *ROOMS, f"--proofs={folder / 'proofs.json'}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    proofs, counts = json.loads((folder / "proofs.json").read_text())
    return Proofs([Proof(*proof) for proof in proofs], [Count(*count) for count in counts])


def note_training(experiment: Experiment) -> None:
    """Note what a parity test trains."""
    degrees = {axis for axis in AXES if getattr(experiment.parallelism, axis) > 1}
    options = {
        "recompute": experiment.activation_checkpoint.mode != "none",
        "compile": experiment.compile.compiles("blocks"),
        "fp8": experiment.quantization.recipe not in ("none", "nvfp4"),
    }
    note(experiment, degrees | {name for name, is_set in options.items() if is_set})


def note(experiment: Experiment, columns: set[str]) -> None:
    """Note a part of `PLANNED`, or columns, as done with a family."""
    noted.append((experiment.model.architecture, columns))


@contextmanager
def held_to_what_ran(item: pytest.Item) -> Iterator[None]:
    """Fail a test that passes and has not built the family, trained over the axis or planned it, as it declares."""
    declared, built = set(columns_of(item)), set[str]()
    noted.clear()
    with ExitStack() as stack:
        for family in {family for family, column in declared if column in BUILT}:
            module = importlib.import_module(builtin_components("model")[family])
            name = "model" if hasattr(module, "model") else "block"
            stack.enter_context(patch.object(module, name, partial(_noted, getattr(module, name), built, family)))
        yield
    ran = {(family, column) for family in built for column in BUILT}
    ran |= {(family, axis) for family, axes in noted for axis in axes}
    ran |= {(family, "plan") for family, _ in noted if {(family, part) for part in PLANNED} <= ran}
    assert declared <= ran, f"declared and not run: {sorted(declared - ran)}"


def _noted(plain: Callable[..., Any], built: set[str], family: str, *args: Any, **settings: Any) -> Any:
    built.add(family)
    return plain(*args, **settings)
