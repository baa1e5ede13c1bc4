"""Differences between two runs, for `titan-exp diff`: configuration, code, environment, data."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titan_exp.config.errors.user_error import shown
from titan_exp.config.schema.identity_keys import flatten, has_effect, same_value
from titan_exp.launch.provenance.changes import code_changes
from titan_exp.tracking.run_folder.run import Run

NOT_THERE = "not there"
MACHINE = ("host", "executable", "cores", "cores_usable", "memory_gib")
"""Keys of the environment that describe one machine among equal ones."""


@dataclass(frozen=True)
class Difference:
    """Key with its values in both runs."""

    key: str
    a: str
    b: str
    has_effect: bool = True
    """True if the key may change results."""


@dataclass(frozen=True)
class RunDiff:
    """Differences between the runs `a` and `b`."""

    a: str
    b: str
    configuration: tuple[Difference, ...]
    code: tuple[str, ...]
    """One line per repository or package."""
    environment: tuple[Difference, ...]
    data: tuple[Difference, ...]
    """Identity and content of the training data as the ranks opened it."""
    unknown: tuple[str, ...]
    """Parts that a run has not recorded."""

    @property
    def is_empty(self) -> bool:
        """True if nothing that both runs have recorded differs."""
        return not (self.configuration or self.code or self.environment or self.data)


def diff_runs(a: Run, b: Run) -> RunDiff:
    """Compare two run folders. Raises UserError if a configuration cannot be read. Imports and resolves nothing."""
    runs = (a, b)
    configs = [flatten(run.config) for run in runs]
    codes = [run.code for run in runs]
    environments = [run.environment for run in runs]
    data = [next((row.data for row in reversed(run.attempts) if row.data is not None), None) for run in runs]
    names = ["/".join(run.folder.path.absolute().parts[-2:]) for run in runs]
    recorded = {"code": codes, "environment": environments, "data": data}
    return RunDiff(
        *names,
        configuration=tuple(_differences(*configs)),
        code=tuple(code_changes(codes[0], codes[1])) if codes[0] and codes[1] else (),
        environment=tuple(_differences(*map(_environment, environments))) if all(environments) else (),
        data=tuple(_differences(*(flatten(found or {}) for found in data))) if all(data) else (),
        unknown=tuple(
            dict.fromkeys(
                f"{part} of {name} is not recorded"
                for part, found in recorded.items()
                for name, record in zip(names, found, strict=True)
                if not record
            )
        ),
    )


def diff_lines(diff: RunDiff) -> Iterator[str]:
    """Text of the differences, values side by side."""
    yield f"a: {diff.a}"
    yield f"b: {diff.b}"
    parts = {
        "configuration": _side_by_side(diff.configuration),
        "code": list(diff.code),
        "environment": _side_by_side(diff.environment),
        "data": _side_by_side(diff.data),
    }
    for heading, lines in parts.items():
        if lines:
            yield f"\n{heading}"
            yield from (f"  {line}" for line in lines)
    same = [part for part, lines in parts.items() if not lines and not any(u.startswith(part) for u in diff.unknown)]
    if diff.is_empty:
        yield "\nnothing differs"
    if same:
        yield f"\nthe same: {', '.join(same)}"
    yield from diff.unknown


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    for key in dict.fromkeys([*a, *b]):
        if key not in a or key not in b or not same_value(a[key], b[key]):
            values = [shown(found[key]) if key in found else NOT_THERE for found in (a, b)]
            yield Difference(key, *values, has_effect=has_effect(key))


def _environment(record: Mapping[str, Any] | None) -> dict[str, Any]:
    found = {key: value for key, value in (record or {}).items() if key not in (*MACHINE, "packages", "environment")}
    packages, variables = (record or {}).get("packages") or {}, (record or {}).get("environment") or {}
    found.pop("torch", None)  # one of the packages
    settings = {f"${name}": value for name, value in variables.items() if not name.startswith("SLURM_")}
    return found | packages | settings


def _side_by_side(differences: Sequence[Difference]) -> list[str]:
    if not differences:
        return []
    rows = [("", "a", "b"), *((difference.key, difference.a, difference.b) for difference in differences)]
    widths = [max(len(row[place]) for row in rows) for place in range(2)]
    notes = ["", *("" if difference.has_effect else "  (does not change results)" for difference in differences)]
    return [
        f"{key:<{widths[0]}}  {a:<{widths[1]}}  {b}{note}".rstrip()
        for (key, a, b), note in zip(rows, notes, strict=True)
    ]
