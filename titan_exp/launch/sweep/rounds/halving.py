"""Successive halving: the best runs of a rung are continued from their checkpoints, the others end there.

A rung is a run that ends early (`training.stop_after`) with the learning rates of the whole one. The next rung is a run
that continues it (`checkpoint.continue_from`). Together they compute what one long run does.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.study.points import Point
from titan_exp.config.study.search import Halving
from titan_exp.launch.state.study_folder import RoundsRecord
from titan_exp.launch.sweep.rounds.rounds import Finished, Rounds
from titan_exp.launch.sweep.sweep_plan import SweepPlan

SHOWN = 6
"""Points listed by name."""


class Rungs(Rounds):
    """Rungs of successive halving over given points; seeds of a point are ranked by their mean and continue
    together."""

    def __init__(self, points: Sequence[Point], halving: Halving) -> None:
        self.halving, self.metric, self.better = halving, halving.metric, halving.better
        super().__init__([self._at(point, 0) for point in points])

    def points(self, finished: Sequence[Finished]) -> list[Point]:
        """Points of the next rung. Raises UserError if every run of the last one diverged."""
        if not finished or len(finished) == len(self.halving.rungs):
            return [] if finished else self.first
        before, rung = finished[-1], len(finished)
        kept = self._survivors(before)
        parents = {entry.plan.folder.path: entry for entry in before.plan.planned if entry.point.variant in kept}
        return [
            self._at(entry.point, rung, f"checkpoint.continue_from={'/'.join(path.parts[-2:])}")
            for path, entry in parents.items()
        ]

    def check(self, plan: SweepPlan) -> None:
        """Check that the metric is logged, that rungs lie within the run, and that survivors have checkpoints."""
        super().check(plan)
        for entry in plan.planned:
            training, checkpoint = entry.plan.experiment.training, entry.plan.experiment.checkpoint
            steps, name = self.halving.steps(training.steps), f"[{entry.point.label}]"
            if steps[-1] != training.steps:
                raise UserError(
                    f"{name} halving.rungs: the last rung is step {steps[-1]}, and training.steps={training.steps}. "
                    f"Set training.steps={steps[-1]}: every rung has the learning rates of the whole run."
                )
            if any(later <= earlier for earlier, later in pairwise(steps)):
                raise UserError(f"{name} halving.rungs: of {training.steps} steps they are {steps}, not increasing.")
            if entry.point.round < len(steps) and (checkpoint.mode == "off" or checkpoint.last == "weights"):
                key = "mode=off" if checkpoint.mode == "off" else "last=weights"
                remedy = "checkpoint=async (checkpoint.every=null saves at the end of a rung alone)"
                remedy = remedy if checkpoint.mode == "off" else "checkpoint.last=full"
                raise UserError(
                    f"{name} checkpoint.{key}: nothing is saved that the next rung could continue. Use {remedy}."
                )

    def result(self, finished: Finished) -> str:
        """Ranking of a rung, and the points that continue."""
        ranking, number = finished.by_variant(self.better), finished.plan.planned[0].point.round
        kept, rungs = self._survivors(finished), len(self.halving.rungs)
        best = ", ".join(f"{variant} ({ranking[variant]:.4f})" for variant in kept[:SHOWN])
        more = f" and {len(kept) - SHOWN} more" if len(kept) > SHOWN else ""
        if number == rungs:
            return f"rung {number} of {rungs}: the best by {self.metric} is {kept[0]} ({ranking[kept[0]]:.4f})"
        goes = "continues" if len(kept) == 1 else "continue"
        return f"rung {number} of {rungs}: {len(kept)} of {len(ranking)} {goes}, by {self.metric}: {best}{more}"

    def upcoming(self, plan: SweepPlan, finished: Sequence[Finished]) -> list[str]:
        """Later rungs and their number of runs, and the cost of all."""
        runs, lines = len(plan.planned), []
        seeds = max(1, runs // len({entry.point.variant for entry in plan.planned}))
        steps = self.halving.steps(plan.planned[0].plan.experiment.training.steps)
        first = len(finished[0].plan.planned) if finished else runs
        counts = [*(len(rung.plan.planned) for rung in finished), runs]
        for number in range(len(counts), len(steps)):
            counts.append(self.halving.kept(counts[-1] // seeds) * seeds)
            lines.append(
                f"rung {number + 1} of {len(steps)}: {counts[-1]} run(s) to step {steps[number]}, the best of rung "
                f"{number} by {self.metric}"
            )
        trained = sum(count * (end - begin) for count, begin, end in zip(counts, [0, *steps], steps, strict=False))
        whole = first * steps[-1]
        lines.append(f"All rungs: {trained:,} steps, {trained / whole:.0%} of the {whole:,} of {first} whole run(s).")
        return lines

    def record(self) -> RoundsRecord:
        """Metric, direction and rungs."""
        halving = self.halving
        return {
            "metric": self.metric,
            "better": self.better,
            "rungs": [str(rung) for rung in halving.rungs],
            "keep": str(halving.keep),
        }

    def _survivors(self, finished: Finished) -> list[str]:
        """Variants that continue, the best first. Raises UserError if all diverged."""
        ranking = finished.by_variant(self.better)
        kept = [variant for variant in ranking if math.isfinite(ranking[variant])][: self.halving.kept(len(ranking))]
        if not kept:
            raise UserError(
                f"All {len(ranking)} points of this rung diverged, so that none continues. Widen the ranges."
            )
        return kept

    def _at(self, point: Point, rung: int, *more: str) -> Point:
        """Point at a rung, counted from 0."""
        stop = self.halving.stop_after(rung)
        ours = ("training.stop_after", "checkpoint.continue_from")
        kept = [text for text in point.overrides if text.partition("=")[0] not in ours]
        stops = [f"training.stop_after={stop}"] if stop is not None else []
        label = point.label if rung == 0 else f"{point.label.partition(' rung=')[0]} rung={rung + 1}"
        return replace(point, overrides=(*kept, *stops, *more), label=label, round=rung + 1)
