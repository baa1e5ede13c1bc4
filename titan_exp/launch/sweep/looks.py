"""Looks of a registered question: pairs of runs with drawn seeds, until the question is decided."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path

from titan_exp.config.errors.user_error import UserError, listed
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.schema.data_sets import BITS, OF_THE_RUN, validation_documents
from titan_exp.config.study.labels import split_override
from titan_exp.config.study.points import NAME, Point, baseline_of, folder_name, study_points
from titan_exp.config.study.study import Direction, Pairs, Study
from titan_exp.launch.evidence import PairedRun, Standing, losing, paired_differences, standing_of
from titan_exp.launch.ledger import Registration
from titan_exp.launch.memory_gate import gpu_hours
from titan_exp.launch.run_plan import run_id
from titan_exp.launch.sweep.rounds import Finished, Rounds, common_set
from titan_exp.launch.sweep.sweep_plan import PlannedPoint, SweepPlan
from titan_exp.models.spec.lookup import model_spec
from titan_exp.tracking.display import format_items
from titan_exp.tracking.run_folder.metrics_jsonl import column_of, read_last_values
from titan_exp.tracking.run_folder.run import read_history


def drawn_seeds(name: str, candidate: str, baseline: str, number: int) -> tuple[int, ...]:
    """Seeds of a question's first pairs, each once: a hash of the study's folder and its two points, so that they
    neither depend on the stopping rule nor are those of another question."""
    found: dict[int, None] = {}
    place = 0
    while len(found) < number:
        digest = hashlib.sha256("\n".join([name, candidate, baseline, str(place)]).encode()).digest()
        found.setdefault(int.from_bytes(digest[:4], "big") >> 1)
        place += 1
    return tuple(found)


class Looks(Rounds):
    """Looks at a candidate and a baseline, given by variant, whose points have every seed of every pair.

    A round has the pairs up to a look. Both runs of a pair have its seed, thus, as far as their configurations agree,
    the same initial weights and data order.
    """

    def __init__(
        self,
        pairs: Pairs,
        better: Direction,
        variants: tuple[str, str],
        seeds: Sequence[int],
        points: Mapping[tuple[str, int], Point],
    ) -> None:
        self.pairs, self.metric, self.better = pairs, pairs.metric or "", better
        self.variants, self.seeds, self._points = variants, tuple(seeds), points
        self._ended: dict[Path, PairedRun] = {}
        super().__init__(self._look(0))

    def points(self, finished: Sequence[Finished]) -> list[Point]:
        if not finished:
            return self.first
        whole = sum((round.plan for round in finished), SweepPlan())
        return self._look(len(finished)) if self.standing(whole).outcome == "continue" else []

    def check(self, plan: SweepPlan) -> None:
        """Check that both runs of every pair can be trained and differ; the first look registers the question."""
        super().check(plan)
        candidate, baseline = self.variants
        if plan.skipped:
            reason = plan.skipped[0].reason
            raise UserError(f"[{plan.skipped[0].point.label}] cannot run, so that its pair has no difference: {reason}")
        if plan.duplicates:
            raise UserError(
                f"{candidate} and {baseline} are the same run, {plan.duplicates[0].plan.run_id}: none of the keys that "
                "they differ in has an effect, or a point sets experiment.seed, which the pairs draw. Change a point."
            )
        arms = {entry.point.variant: entry.plan.experiment for entry in plan.planned}
        if self.metric.partition("/")[0] in OF_THE_RUN:
            self._require_same_documents(arms)
        if self.registration is None:
            self.registration = self._registered(arms[candidate], arms[baseline])

    def _require_same_documents(self, arms: Mapping[str, Experiment]) -> None:
        candidate, baseline = self.variants
        (group, found), (_, other) = (validation_documents(arms[variant], self.metric) for variant in self.variants)
        differing = [key for key in found if found[key] != other[key]]
        if not differing:
            return
        remedy = f"Give both {common_set(arms[baseline].data)}"
        if differing == ["tokenizer"]:
            _, slash, name = self.metric.partition("/")
            group, remedy = "data", f"Ask about {BITS}{slash}{name}, which is of the same text in every tokenizer."
        what = f"{group}.{differing[0]} differs between {candidate} and {baseline}"
        raise UserError(f"{what}, so that {self.metric} is of two validation sets. {remedy}")

    def result(self, finished: Finished) -> str:
        number, ends = finished.plan.planned[0].point.round, self.pairs.ends
        return f"look {number} of {len(ends)}: {format_items(ends[number - 1], 'pair')} complete"

    def upcoming(self, plan: SweepPlan, finished: Sequence[Finished]) -> list[str]:
        assert self.registration is not None, "a look is checked first"
        (candidate, baseline), number, most = self.variants, len(finished) + 1, len(self.pairs.ends)
        early = f", and the last unless {candidate} is ahead" if self.pairs.futility and number < most else ""
        lines = [
            f"{candidate} against {baseline}: looks {self.registration.when}, with an error rate of "
            f"{100 * self.pairs.alpha:.3g} % over all. This is look {number} of at most {most}{early}.",
        ]
        asked = {entry.point.variant: gpu_hours(entry.plan) for entry in plan.planned}
        asking, pairs = [value for value in asked.values() if value is not None], self.pairs.ends[-1]
        whole = f", which ask for {pairs * sum(asking):,.1f} GPU-hours" if len(asking) == 2 else ""
        runs = f"This look has {len(plan.planned)} runs"
        lines.append(f"{runs}. All {pairs} pairs together have {2 * pairs} runs{whole}.")
        models = [entry.plan.experiment.model for entry in plan.planned[:2]]
        if len(models) == 2 and models[0] != models[1]:
            lines.append(
                "The two models differ. The runs of a pair share their data, and the initial weights of those modules "
                "that both models have and initialize alike."
            )
        return lines

    def hopeless(self, plan: SweepPlan) -> str:
        """Reason for dropping the candidate before the next look; empty if there is none. Pairs whose runs have not
        both ended count at their last equal step, in the second half of equal schedules, but never speak for it."""
        if not self.pairs.futility:
            return ""
        runs, gains = {(entry.point.variant, entry.point.seed): entry for entry in plan.planned}, list[float]()
        for seed in self.seeds:
            pair = [runs[variant, seed] for variant in self.variants if (variant, seed) in runs]
            ended = [value for entry in pair if (value := self._run(entry).value) is not None]
            values = ended if len(ended) == 2 else _at_equal_step(pair, self.metric)
            if len(values) == 2:
                gains += paired_differences({seed: values[0]}, {seed: values[1]}, [seed], self.better)
        return losing(gains)

    def standing(self, plan: SweepPlan, dropped: str = "") -> Standing:
        assert self.registration is not None, "a look is checked first"
        runs = {(entry.point.variant, entry.point.seed or 0): self._run(entry) for entry in plan.planned}
        return standing_of(self.registration, runs, dropped)

    def conclusion(self, plan: SweepPlan, dropped: str = "") -> str:
        standing = self.standing(plan, dropped)
        return "" if standing.outcome == "continue" else standing.sentence

    def _look(self, number: int) -> list[Point]:
        """Points of a look, counted from 0, pair by pair with the baseline first."""
        begin, end = (0, *self.pairs.ends)[number : number + 2]
        pairs = [(variant, seed) for seed in self.seeds[begin:end] for variant in reversed(self.variants)]
        return [replace(self._points[pair], round=number + 1) for pair in pairs]

    def _run(self, entry: PlannedPoint) -> PairedRun:
        folder = entry.plan.folder
        if folder.path not in self._ended:
            value = self.values(SweepPlan((entry,), (), ())).get(folder.path)
            attempts, seconds = folder.read_attempts(), None  # unknown while the times of an attempt are
            if attempts and not any(row.start is None or row.end is None for row in attempts):
                seconds = sum((row.end - row.start) * row.world_size for row in attempts if row.start and row.end)
            run = PairedRun(value, int(read_last_values(folder.metrics).get("tokens") or 0), seconds)
            if value is None:
                return run
            self._ended[folder.path] = run
        return self._ended[folder.path]

    def _registered(self, candidate: Experiment, baseline: Experiment) -> Registration:
        """Registration by the configurations of both points, at any seed."""
        training, spec = baseline.training, model_spec(baseline.model)
        _, data = validation_documents(baseline, self.metric)
        documents = "all" if data["validation_documents"] is None else data["validation_documents"]
        arms = [replace(each, experiment=replace(each.experiment, seed=0)) for each in (candidate, baseline)]
        return Registration(
            *self.variants,
            arms=(run_id(arms[0]), run_id(arms[1])),
            metric=self.metric,
            better=self.better,
            validation=f"{data['dataset'] or data['source']}, {documents} documents",
            parameters=None if spec is None else spec.parameters,
            tokens=training.sequences_after(training.steps) * training.seq_len,
            looks=self.pairs.ends,
            anytime=not self.pairs.looks,
            alpha=self.pairs.alpha,
            futility=self.pairs.futility,
            tries=self.pairs.tries,
            seeds=self.seeds,
        )


def looks_of(study: Study, size: str, fixed: Sequence[str], better: Direction) -> Looks:
    """Looks of a study with pairs, whose points typed overrides may have narrowed. Raises UserError if they are not
    two, or the baseline is none of them, or seeds were typed."""
    assert study.pairs is not None
    if study.seeds:
        typed = f"experiment.seed={','.join(map(str, study.seeds))}"
        remedy = "Leave it out; another name of the study has other seeds."
        raise UserError(f"{typed}: the pairs of {study.path} draw their seeds. {remedy}")
    points = [point for point in study_points(study, size, fixed) if point.excluded is None]
    variants = [point.variant for point in points]
    if len(variants) != 2:
        raise UserError(
            f"{study.path}: pairs test one point against the baseline, and this study has {len(variants)} point(s) "
            f"({listed(variants[:4], 'and')}). Leave two of them, for example axes: [{{list: {{plain: [], new: "
            "[optimizer.lr=1e-3]}}], or leave pairs out."
        )
    baseline = baseline_of(study, points)
    assert baseline is not None, "required beside pairs"
    (candidate,) = (variant for variant in variants if variant != baseline)
    name = dict(map(split_override, fixed)).get(NAME, folder_name(study, size))
    seeds = drawn_seeds(name, candidate, baseline, study.pairs.ends[-1])
    seeded = study_points(replace(study, seeds=seeds), size, fixed)
    by_pair = {(point.variant, point.seed or 0): point for point in seeded}
    return Looks(study.pairs, better, (candidate, baseline), seeds, by_pair)


def _at_equal_step(pair: Sequence[PlannedPoint], metric: str) -> list[float]:
    """Metric of both runs of a pair at the last step that both have logged it; empty before half of the run, and if
    their schedules differ, so that no step is the same phase of both."""
    runs = [(entry.plan.experiment.lr_schedule, entry.plan.experiment.training) for entry in pair]
    phases = [(rates, one.steps, one.seq_len, one.global_batch_size) for rates, one in runs]
    if len(pair) != 2 or phases[0] != phases[1]:
        return []
    logged = list[dict[int, float]]()
    for folder in (entry.plan.folder for entry in pair):
        rows = read_history(folder.path) if folder.metrics.exists() else []
        values = zip(column_of(rows, "step"), column_of(rows, metric), strict=True)
        known = [(step, float(value)) for step, value in values if value is not None]
        logged.append({int(step or 0): value for step, value in known if isfinite(value)})
    last = max(logged[0].keys() & logged[1].keys(), default=0)
    half = pair[0].plan.experiment.training.steps / 2
    return [values[last] for values in logged] if last >= half else []
