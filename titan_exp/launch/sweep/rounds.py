"""Rounds of an adaptive study: drawn points, batches, successive halving, Optuna."""

import importlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from titan_exp.config.errors.user_error import UserError, did_you_mean, listed
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.schema.data_sets import DOCUMENTS, OF_THE_RUN, validation_metrics
from titan_exp.config.schema.foreign_code import described
from titan_exp.config.study.labels import text_of
from titan_exp.config.study.points import Point
from titan_exp.config.study.study import Choice, Direction, Halving, Range, Search
from titan_exp.launch.ledger import Registration
from titan_exp.launch.run_lookup import RoundsRecord
from titan_exp.launch.sweep.sweep_plan import SweepPlan
from titan_exp.tracking.display import format_items
from titan_exp.tracking.run_folder.metrics_jsonl import final_value
from titan_exp.tracking.run_folder.run import read_history
from titan_exp.tracking.run_folder.run_folder import RunFolder, has_diverged

if TYPE_CHECKING:
    from titan_exp.launch.evidence import Standing  # imports NumPy, which other studies need not

REPEATS = 200  # draws per wanted point; more would mean that the ranges have hardly any other point


def drawn_choices(search: Search) -> tuple[Choice, ...]:
    """Distinct points of a `random` or `sobol` search; the first ones do not depend on their number. Raises UserError
    if the ranges have fewer."""
    found: dict[Choice, None] = {}
    for row in _rows(search):
        found.setdefault(choice_at(search, [one.value(u) for one, u in zip(search.ranges.values(), row, strict=True)]))
        if len(found) == search.points:
            return tuple(found)
    less = f"search.points={search.points}: these ranges have only {len(found)} different points"
    raise UserError(f"{less}. Ask for fewer, or widen the ranges.")


def choice_at(search: Search, values: Sequence[str]) -> Choice:
    """Choice that sets each range's key to a value."""
    overrides = tuple(map("{}={}".format, search.ranges, values))
    return Choice(overrides, " ".join(overrides))


def _rows(search: Search) -> Iterator[list[float]]:
    """Points of the unit cube: independent, or a Sobol sequence shifted modulo 1 by one random vector (Cranley and
    Patterson 1976), which every version of scipy computes alike."""
    import numpy as np

    generator, dimensions = np.random.default_rng(search.seed), len(search.ranges)
    if search.method == "random":
        for _ in range(search.points * REPEATS):
            yield generator.random(dimensions).tolist()
        return
    from scipy.stats import qmc

    shift, sequence = generator.random(dimensions), qmc.Sobol(dimensions, scramble=False)
    for _ in range(search.points * REPEATS):
        yield ((sequence.random(1)[0] + shift) % 1.0).tolist()


def next_batch(search: Search, better: Direction, results: Sequence[tuple[Choice, float]]) -> tuple[Choice, ...]:
    """Propose the batch that follows `results`, all points so far with their metric, infinite if diverged; empty at the
    end. Raises UserError if Optuna is not installed, or finds too few new points."""
    wanted = min(search.batch or search.points, search.points - len(results))
    if wanted <= 0:
        return ()
    optuna = import_optuna()

    def distribution(one: Range) -> Any:
        if one.choice:
            return optuna.distributions.CategoricalDistribution(one.choice)
        if one.integer:
            return optuna.distributions.IntDistribution(*one.integer)
        return optuna.distributions.FloatDistribution(*one.bounds, log=one.kind == "log_uniform")

    distributions = {key: distribution(one) for key, one in search.ranges.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(seed=search.seed + len(results), constant_liar=True)
    direction = "minimize" if better == "min" else "maximize"
    study = optuna.create_study(sampler=sampler, direction=direction)
    convert = {"choice": str, "integer": int, "uniform": float, "log_uniform": float}
    for choice, value in results:
        texts = zip(search.ranges.items(), choice.overrides, strict=True)
        params = {key: convert[one.kind](text.partition("=")[2]) for (key, one), text in texts}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=value))
    known, found = {choice for choice, _ in results}, dict[Choice, None]()
    for _ in range(search.points * REPEATS):
        asked = study.ask(distributions).params
        values = [asked[key] if one.choice else one.text(asked[key]) for key, one in search.ranges.items()]
        choice = choice_at(search, values)
        if choice not in known:
            found.setdefault(choice)
        if len(found) == wanted:
            return tuple(found)
    less = (
        f"search.points={search.points}: Optuna finds only {len(known) + len(found)} different points in these ranges"
    )
    raise UserError(f"{less}. Ask for fewer, or widen the ranges.")


def import_optuna() -> Any:
    """Import Optuna, quietly. Raises UserError if it is not installed."""
    try:
        optuna = importlib.import_module("optuna")
    except ImportError:
        remedy = "Type pip install 'titan_exp[optuna]', or use search.method=sobol, which needs nothing more."
        raise UserError(f"search.method=optuna: the package optuna is not installed. {remedy}") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


@dataclass(frozen=True)
class Finished:
    """Round whose runs are all done or have diverged."""

    plan: SweepPlan
    values: Mapping[Path, float]  # metric of each run, by run folder; infinite if it diverged

    def by_variant(self, better: Direction) -> dict[str, float]:
        """Mean over seeds of each variant, best first; ties keep the study's order."""
        found: dict[str, list[float]] = {}
        for entry in self.plan.planned:
            found.setdefault(entry.point.variant, []).append(self.values[entry.path])
        sign = 1 if better == "min" else -1
        means = {variant: fmean(values) for variant, values in found.items()}
        return dict(sorted(means.items(), key=lambda item: sign * item[1]))


class Rounds:
    """Single round: all points of a grid, or of a sweep without a study."""

    metric = ""  # metric on which later rounds depend; empty for a single round
    better: Direction = "min"
    registration: Registration | None = None  # registered question, known after `check`; None of another study

    def __init__(self, points: Sequence[Point]) -> None:
        self.first = list(points)  # points of the first round, including excluded ones

    def points(self, finished: Sequence[Finished]) -> list[Point]:
        """Points of the round after the finished ones; empty at the end."""
        return [] if finished else self.first

    def check(self, plan: SweepPlan) -> None:
        """Check the runs of a round. Raises UserError if later rounds could not build on them."""
        for entry in plan.planned if self.metric.startswith("validation") else ():
            if not entry.plan.experiment.evaluation.enabled:
                remedy = "Evaluate at least at the end, for example with evaluation.every=1000, or rank by metric: loss"
                what = f"[{entry.point.label}] with evaluation.every=0 no run logs {self.metric}"
                raise UserError(f"{what}. {remedy}.")
        require_logged(self.metric, plan, by_all=True)

    def result(self, finished: Finished) -> str:
        """Sentence about a finished round."""
        return ""

    def upcoming(self, plan: SweepPlan, finished: Sequence[Finished]) -> list[str]:
        """Sentences about the rounds after `plan`, which itself follows the finished ones."""
        return []

    def cost(self, plan: SweepPlan) -> tuple[list[list[str]], list[str]]:
        """Table of what all rounds cost, headings first, and sentences about it; empty if the plan says it."""
        return [], []

    def hopeless(self, plan: SweepPlan) -> str:
        """Reason for ending a study before its round is complete, by its runs so far; empty if there is none."""
        return ""

    def standing(self, plan: SweepPlan, dropped: str = "") -> "Standing | None":
        """Standing of the registered question over all planned runs; None of another study."""
        return None

    def conclusion(self, plan: SweepPlan, dropped: str = "") -> str:
        """Answer of the study, with the reason for ending it before a round was complete; empty if there is none."""
        return ""

    def record(self) -> RoundsRecord:
        """Description in study.json, for `status` and `compare`."""
        return {}

    def values(self, plan: SweepPlan) -> dict[Path, float]:
        """Metric of each done or diverged run, by its folder. Raises UserError if a done run never logged it."""
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


def require_logged(metric: str, plan: SweepPlan, *, by_all: bool) -> None:
    """Raise UserError if some run of a plan will not log this validation metric, or, unless `by_all`, none will."""
    if metric.partition("/")[0] not in OF_THE_RUN:
        return
    lacks = {}
    for entry in plan.planned:
        logged = validation_metrics(entry.plan.experiment)
        if logged is not None and metric not in logged:
            lacks[entry.point.label] = logged, entry.plan.experiment.data
    if not lacks or (not by_all and len(lacks) < len(plan.planned)):
        return
    label, (logged, data) = next(iter(lacks.items()))
    offer = did_you_mean(metric, logged)
    remedy = f"{offer[:1].upper()}{offer[1:]} Or give" if offer else "Give"
    said = f"metric {metric}: [{label}] will not log it. It logs {listed(logged, 'and')}"
    raise UserError(f"{said}. {remedy} all points {common_set(data)}")


def common_set(data: DataConfig) -> str:
    """Remedy for runs without a common validation set: one that holds out what a run on `data` does."""
    keys = ("source", *described(data.source).reads, "validation_split", "validation_fraction", "validation_documents")
    values = {key: getattr(data, key) for key in DOCUMENTS if key in keys and getattr(data, key)}
    where = ""
    if described(data.source).holds == "tokens":  # all documents of a store would be read, those to train on, too
        values = {"source": "text", "paths": ["corpus"], "validation_fraction": 0.02}
        where = ", where corpus is the folder that you tokenized"
    override = f"+evaluation.sets.common={{data:{text_of(values)}}}"
    return f'one set, held_fixed: ["{override}"]{where}, and ask about validation_loss/common.'


def _metric_of(folder: RunFolder, metric: str) -> float:
    rows = read_history(folder.path)
    value = final_value(rows, metric)
    if value is None:
        logged = sorted({key for row in rows for key in row if row[key] is not None} - {"step", "tokens", "attempt"})
        offer = did_you_mean(metric, logged) or f"It logs {listed(logged, 'and')}."
        raise UserError(f"metric {metric}: {folder.path} never logged it. {offer[:1].upper()}{offer[1:]}")
    return value


class Batches(Rounds):
    """Batches of a search; `expand` makes points from the choices so far, including seeds."""

    def __init__(self, search: Search, better: Direction, expand: Callable[[Sequence[Choice]], list[Point]]) -> None:
        import_optuna()
        self.search, self.metric, self.better = search, search.metric or "", better
        self._expand = expand
        self._proposed: list[tuple[Choice, ...]] = [next_batch(search, better, ())]
        super().__init__(expand(self._proposed[0]))

    def points(self, finished: Sequence[Finished]) -> list[Point]:
        if not finished:
            return self.first
        results, worst = list[tuple[Choice, float]](), math.inf if self.better == "min" else -math.inf
        for batch, round in zip(self._proposed, finished, strict=False):
            # The mean over seeds of each choice; one that could not run gets the worst value.
            found: dict[Choice, list[float]] = {choice: [] for choice in batch}
            for entry in (*round.plan.planned, *round.plan.duplicates):
                choice = next(choice for choice in batch if set(choice.overrides) <= set(entry.point.overrides))
                found[choice].append(round.values[entry.path])
            results += [(choice, fmean(values) if values else worst) for choice, values in found.items()]
        del self._proposed[len(finished) :]
        self._proposed.append(next_batch(self.search, self.better, results))
        before = sum(map(len, self._proposed[:-1]))
        if not self._proposed[-1]:
            return []
        every = self._expand([choice for batch in self._proposed for choice in batch])
        new = every[len(every) * before // sum(map(len, self._proposed)) :]
        return [replace(point, round=len(finished) + 1) for point in new]

    def result(self, finished: Finished) -> str:
        ranking, number = finished.by_variant(self.better), finished.plan.planned[0].point.round
        best, count = next(iter(ranking)), -(-self.search.points // (self.search.batch or 1))
        return f"batch {number} of {count}: the best by {self.metric} is {best} ({ranking[best]:.4f})"

    def upcoming(self, plan: SweepPlan, finished: Sequence[Finished]) -> list[str]:
        if not (left := self.search.points - sum(map(len, self._proposed))):
            return []
        points = format_items(left, "more point")
        return [f"The search proposes {points} from the results of these, in batches of {self.search.batch}."]

    def record(self) -> RoundsRecord:
        return {"metric": self.metric, "better": self.better}


SHOWN = 6


class Rungs(Rounds):
    """Successive halving over given points. The seeds of a point are ranked by their mean and continue together."""

    def __init__(self, points: Sequence[Point], halving: Halving, better: Direction) -> None:
        self.halving, self.metric, self.better = halving, halving.metric or "", better
        super().__init__([self._at(point, 0) for point in points])

    def points(self, finished: Sequence[Finished]) -> list[Point]:
        """Points of the next rung. Raises UserError if every run of the last one diverged."""
        if not finished or len(finished) == len(self.halving.rungs):
            return [] if finished else self.first
        before, rung = finished[-1], len(finished)
        kept = self._survivors(before)
        parents = [entry for entry in before.plan.planned if entry.point.variant in kept]
        return [self._at(entry.point, rung, f"checkpoint.continue_from={entry.plan.name}") for entry in parents]

    def check(self, plan: SweepPlan) -> None:
        """Check that the metric is logged, that rungs lie within the run, and that survivors have checkpoints."""
        super().check(plan)
        for entry in plan.planned:
            training, checkpoint = entry.plan.experiment.training, entry.plan.experiment.checkpoint
            steps, name = self.halving.steps(training.steps), f"[{entry.point.label}]"
            if steps[-1] != training.steps:
                what = f"the last rung is step {steps[-1]}, and training.steps={training.steps}"
                remedy = f"Set training.steps={steps[-1]}, since every rung has the learning rates of the whole run."
                raise UserError(f"{name} halving.rungs: {what}. {remedy}")
            if any(later <= earlier for earlier, later in pairwise(steps)):
                ends = f"with {training.steps} steps the rungs end at {steps}"
                raise UserError(f"{name} halving.rungs: {ends}. Give rungs that increase.")
            if entry.point.round < len(steps) and (checkpoint.mode == "off" or checkpoint.last == "weights"):
                key, remedy = "last=weights", "checkpoint.last=full"
                if checkpoint.mode == "off":
                    key = "mode=off"
                    remedy = "checkpoint=async (with checkpoint.every=null to save only at the end of a rung)"
                what = "the run saves nothing that the next rung could continue"
                raise UserError(f"{name} checkpoint.{key}: {what}. Use {remedy}.")

    def result(self, finished: Finished) -> str:
        ranking, number = finished.by_variant(self.better), finished.plan.planned[0].point.round
        kept, rungs = self._survivors(finished), len(self.halving.rungs)
        best = ", ".join(f"{variant} ({ranking[variant]:.4f})" for variant in kept[:SHOWN])
        more = f" and {len(kept) - SHOWN} more" if len(kept) > SHOWN else ""
        if number == rungs:
            return f"rung {number} of {rungs}: the best by {self.metric} is {kept[0]} ({ranking[kept[0]]:.4f})"
        goes = "continues" if len(kept) == 1 else "continue"
        return f"rung {number} of {rungs}: {len(kept)} of {len(ranking)} {goes}, by {self.metric}: {best}{more}"

    def upcoming(self, plan: SweepPlan, finished: Sequence[Finished]) -> list[str]:
        runs, lines = len(plan.planned), []
        seeds = max(1, runs // len({entry.point.variant for entry in plan.planned}))
        steps = self.halving.steps(plan.planned[0].plan.experiment.training.steps)
        first = len(finished[0].plan.planned) if finished else runs
        counts = [*(len(rung.plan.planned) for rung in finished), runs]
        for number in range(len(counts), len(steps)):
            counts.append(self.halving.kept(counts[-1] // seeds) * seeds)
            what = f"{format_items(counts[-1], 'run')} to step {steps[number]}"
            lines.append(f"rung {number + 1} of {len(steps)}: {what}, the best of rung {number} by {self.metric}")
        trained = sum(count * (end - begin) for count, begin, end in zip(counts, [0, *steps], steps, strict=False))
        whole = first * steps[-1]
        all_of = f"{trained / whole:.0%} of the {whole:,} of {format_items(first, 'whole run')}"
        return [*lines, f"All rungs: {trained:,} steps, {all_of}."]

    def record(self) -> RoundsRecord:
        rungs, keep = [str(rung) for rung in self.halving.rungs], str(self.halving.keep)
        return {"metric": self.metric, "better": self.better, "rungs": rungs, "keep": keep}

    def _survivors(self, finished: Finished) -> list[str]:
        ranking = finished.by_variant(self.better)
        kept = [variant for variant in ranking if math.isfinite(ranking[variant])][: self.halving.kept(len(ranking))]
        if not kept:
            raise UserError(f"All {len(ranking)} points of this rung diverged, so none can continue. Widen the ranges.")
        return kept

    def _at(self, point: Point, rung: int, *more: str) -> Point:
        stop = self.halving.stop_after(rung)
        ours = ("training.stop_after", "checkpoint.continue_from")
        kept = [text for text in point.overrides if text.partition("=")[0] not in ours]
        stops = [f"training.stop_after={stop}"] if stop is not None else []
        label = point.label if rung == 0 else f"{point.label.partition(' rung=')[0]} rung={rung + 1}"
        return replace(point, overrides=(*kept, *stops, *more), label=label, round=rung + 1)
