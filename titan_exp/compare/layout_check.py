"""Layout invariance check: losses of the same experiment id in two layouts.

A layout changes only rounding, whose effect grows during training: the tolerance applies to the first steps, and the
final difference is informational.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titan_exp.compare.differing_keys import differing_keys
from titan_exp.compare.run_record import Run
from titan_exp.config.schema.config_diff import flatten
from titan_exp.tracking.run_folder.metric_rows import column_of

STEPS = 10
"""Steps with a tolerance, as many as the parity tests train."""

TOLERANCE = {"fp32": 2e-6, "bf16": 2e-3}
"""Maximum relative loss difference of the parity tests, by `training.mixed_precision`."""


@dataclass(frozen=True)
class LayoutCheck:
    """One experiment with one seed in two layouts."""

    experiment_id: str
    seed: int | None
    layouts: tuple[str, str]
    run_ids: tuple[str, str]
    steps: int
    """Number of the first STEPS steps that both runs logged."""
    largest: float | None
    """Maximum relative loss difference over these steps; None without steps."""
    tolerance: float | None
    """Maximum accepted difference; None if the precision has none."""
    last_step: int | None
    """Last step that both runs logged."""
    last: float | None
    """Relative loss difference at `last_step`."""

    @property
    def holds(self) -> bool | None:
        """True if the difference is within the tolerance; None if unknown."""
        return None if self.largest is None or self.tolerance is None else self.largest <= self.tolerance


def layout_checks(runs: Sequence[Run]) -> list[LayoutCheck]:
    """Check every run of an experiment against its first layout."""
    groups: dict[tuple[str, int | None], list[Run]] = defaultdict(list)
    for run in runs:
        if run.experiment_id and run.rows:
            groups[run.experiment_id, run.seed].append(run)
    checks = []
    for members in groups.values():
        first, *others = sorted(members, key=lambda run: run.world_size or 0)
        checks += [_check(first, other) for other in others]
    return checks


def _check(one: Run, two: Run) -> LayoutCheck:
    early, late = _losses(one), _losses(two)
    common = sorted(early.keys() & late.keys())
    first = [step for step in common if step <= STEPS]
    last = common[-1] if common else None
    precision = one.config.get("training", {}).get("mixed_precision")
    return LayoutCheck(
        experiment_id=str(one.experiment_id),
        seed=one.seed,
        layouts=_layouts(one.config, two.config),
        run_ids=(one.run_id, two.run_id),
        steps=len(first),
        largest=max((_relative(early[step], late[step]) for step in first), default=None),
        tolerance=TOLERANCE.get(precision),
        last_step=last,
        last=None if last is None else _relative(early[last], late[last]),
    )


def _layouts(one: Mapping[str, Any], two: Mapping[str, Any]) -> tuple[str, str]:
    columns = differing_keys([one, two])
    return columns.label(flatten(one)), columns.label(flatten(two))


def _losses(run: Run) -> dict[int, float]:
    return {
        int(step or 0): float(loss)
        for step, loss in zip(column_of(run.rows, "step"), column_of(run.rows, "loss"), strict=True)
        if loss is not None
    }


def _relative(one: float, two: float) -> float:
    return abs(one - two) / max(abs(one), abs(two), 1e-12)
