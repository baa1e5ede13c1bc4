"""Batches of Optuna: each is proposed from the results of those before."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from titan_exp.config.study.points import Point
from titan_exp.config.study.search import Search
from titan_exp.config.study.study import Choice
from titan_exp.launch.state.study_folder import RoundsRecord
from titan_exp.launch.sweep.rounds.optuna_search import import_optuna, next_batch
from titan_exp.launch.sweep.rounds.rounds import Finished, Rounds
from titan_exp.launch.sweep.sweep_plan import SweepPlan


class Batches(Rounds):
    """Batches of a search; `expand` makes the points of the choices so far, seeds included.

    Raises UserError if Optuna is not installed.
    """

    def __init__(self, search: Search, expand: Callable[[Sequence[Choice]], list[Point]]) -> None:
        import_optuna()
        self.search, self.metric, self.better = search, search.metric, search.better
        self._expand = expand
        self._proposed: list[tuple[Choice, ...]] = [next_batch(search, ())]
        super().__init__(expand(self._proposed[0]))

    def points(self, finished: Sequence[Finished]) -> list[Point]:
        """Points of the next batch."""
        if not finished:
            return self.first
        results = [
            (choice, value)
            for batch, round in zip(self._proposed, finished, strict=False)
            for choice, value in self._results(batch, round)
        ]
        del self._proposed[len(finished) :]
        self._proposed.append(next_batch(self.search, results))
        before = sum(map(len, self._proposed[:-1]))
        if not self._proposed[-1]:
            return []
        every = self._expand([choice for batch in self._proposed for choice in batch])
        new = every[len(every) * before // sum(map(len, self._proposed)) :]
        return [replace(point, round=len(finished) + 1) for point in new]

    def result(self, finished: Finished) -> str:
        """Best point of a batch."""
        ranking, number = finished.by_variant(self.better), finished.plan.planned[0].point.round
        best = next(iter(ranking))
        return f"batch {number} of {self._count}: the best by {self.metric} is {best} ({ranking[best]:.4f})"

    def upcoming(self, plan: SweepPlan, finished: Sequence[Finished]) -> list[str]:
        """Number of points that are still to be proposed."""
        known = sum(map(len, self._proposed))
        left = self.search.points - known
        if not left:
            return []
        return [f"{left} more point(s), in batches of {self.search.batch}, are proposed from the results of these."]

    def record(self) -> RoundsRecord:
        """Metric and direction."""
        return {"metric": self.metric, "better": self.better}

    @property
    def _count(self) -> int:
        return -(-self.search.points // self.search.batch)

    def _results(self, batch: Sequence[Choice], round: Finished) -> list[tuple[Choice, float]]:
        """Mean over seeds of each choice of a batch; a choice that could not run has the worst value."""
        worst = math.inf if self.better == "min" else -math.inf
        found: dict[Choice, list[float]] = {choice: [] for choice in batch}
        for entry in (*round.plan.planned, *round.plan.duplicates):
            choice = next(choice for choice in batch if set(choice.overrides) <= set(entry.point.overrides))
            found[choice].append(round.values[entry.plan.folder.path])
        return [(choice, fmean(values) if values else worst) for choice, values in found.items()]
