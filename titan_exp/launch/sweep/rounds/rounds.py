"""Round of a sweep: points that start together; the next round's points follow from their results.

Nothing but run folders is read, so the same command finds the same rounds again and starts what is missing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from titan_exp.config.errors.did_you_mean import did_you_mean, listed
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.study.points import Point
from titan_exp.config.study.study import Direction
from titan_exp.launch.state.study_folder import RoundsRecord
from titan_exp.launch.sweep.sweep_plan import SweepPlan
from titan_exp.tracking.run_folder.final_value import final_value
from titan_exp.tracking.run_folder.lineage import read_history
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.tracking.run_folder.state import has_diverged


@dataclass(frozen=True)
class Finished:
    """Round whose runs are all done, or diverged."""

    plan: SweepPlan
    values: Mapping[Path, float]
    """Metric of each run, by its folder; infinite if it diverged."""

    def by_variant(self, better: Direction) -> dict[str, float]:
        """Mean over seeds of each variant, the best first; equal ones in the study's order."""
        found: dict[str, list[float]] = {}
        for entry in self.plan.planned:
            found.setdefault(entry.point.variant, []).append(self.values[entry.plan.folder.path])
        sign = 1 if better == "min" else -1
        means = {variant: fmean(values) for variant, values in found.items()}
        return dict(sorted(means.items(), key=lambda item: sign * item[1]))


class Rounds:
    """Single round: all points of a grid, or of a sweep without a study."""

    metric = ""
    """Metric on which later rounds depend; empty for a single round."""
    better: Direction = "min"

    def __init__(self, points: Sequence[Point]) -> None:
        self.first = list(points)
        """Points of the first round, excluded ones included."""

    def points(self, finished: Sequence[Finished]) -> list[Point]:
        """Points of the round after the finished ones; none at the end."""
        return [] if finished else self.first

    def check(self, plan: SweepPlan) -> None:
        """Check the runs of a round. Raises UserError if later rounds could not follow from them."""
        for entry in plan.planned if self.metric.startswith("validation") else ():
            if not entry.plan.experiment.training.evaluate_every:
                raise UserError(
                    f"[{entry.point.label}] {self.metric} is never logged: training.evaluate_every=0. Evaluate at the "
                    "end of a run at least, for example training.evaluate_every=1000, or rank by metric: loss."
                )

    def result(self, finished: Finished) -> str:
        """Sentence about a finished round."""
        return ""

    def upcoming(self, plan: SweepPlan, finished: Sequence[Finished]) -> list[str]:
        """Sentences about the rounds after that of `plan`, which follows the finished ones."""
        return []

    def record(self) -> RoundsRecord:
        """Description in study.json, for `status` and `compare`."""
        return {}

    def values(self, plan: SweepPlan) -> dict[Path, float]:
        """Metric of each run that is done or has diverged, by its folder. Raises UserError if a done run never logged
        it."""
        if not self.metric:
            return {}
        worst = math.inf if self.better == "min" else -math.inf
        found = {}
        for entry in plan.planned:
            folder = entry.plan.folder
            state = folder.read_state()
            if state is not None and has_diverged(state.state, state.reason):
                found[folder.path] = worst
            elif state is not None and state.state == "done":
                value = _metric_of(folder, self.metric)
                found[folder.path] = value if math.isfinite(value) else worst
        return found


def _metric_of(folder: RunFolder, metric: str) -> float:
    rows = read_history(folder.path)
    value = final_value(rows, metric)
    if value is None:
        logged = sorted({key for row in rows for key in row if row[key] is not None} - {"step", "tokens", "attempt"})
        offer = did_you_mean(metric, logged) or f"Logged are {listed(logged, 'and')}."
        raise UserError(f"metric {metric}: {folder.path} has never logged it. {offer}")
    return value
