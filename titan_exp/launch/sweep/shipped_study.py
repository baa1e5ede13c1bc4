"""Study sweep: study file, planned points and study folder."""

import contextlib
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import default_overrides
from titan_exp.config.schema.identity_keys import differences, flatten, has_effect
from titan_exp.config.schema.typed_config import to_dict
from titan_exp.config.study.labels import split_override
from titan_exp.config.study.points import SEED, FilePoints, Point, baseline_of, chosen_size, narrowed, study_points
from titan_exp.config.study.study import Direction, Study
from titan_exp.launch.executor import executor_for, last_executor
from titan_exp.launch.ledger import LEDGER, Registration, enter
from titan_exp.launch.run_lookup import LadderRecord, StudyFolder, StudyRecord, StudyRun
from titan_exp.launch.run_plan import explain_write_errors
from titan_exp.launch.run_status import run_statuses
from titan_exp.launch.sweep.ladder import PARENT, RUNG, LadderRounds
from titan_exp.launch.sweep.rounds import Batches, Rounds, Rungs, drawn_choices, require_logged
from titan_exp.launch.sweep.sweep_plan import PlannedPoint, SweepPlan
from titan_exp.tracking.display import format_items
from titan_exp.tracking.run_folder.files import FileLock
from titan_exp.tracking.run_folder.run import Run
from titan_exp.tracking.run_folder.run_folder import LockedError, RunFolder, has_diverged


class StudySweep:
    """Study at one size (None is the first), with overrides typed on the command line. `compose` composes a point, as a
    ladder needs to count parameters. `change_question` allows another question than the one registered. Raises
    UserError if the size does not exist, or the overrides leave no points or split values that belong together."""

    def __init__(
        self,
        study: Study,
        size: str | None,
        typed: Sequence[Override],
        compose: Callable[[Point], Experiment],
        *,
        change_question: bool = False,
    ) -> None:
        self.study, self._compose, self._change_question = study, compose, change_question
        self.size = chosen_size(study, size)
        leave_out = default_overrides()
        texts = (str(override.input_line) for override in typed)
        self._typed = tuple(text for text in texts if text not in leave_out)
        varied, fixed = narrowed(study, typed)
        self.rounds = self._rounds(varied, fixed)
        ranges = {} if varied.search is None else varied.search.ranges
        self._parameters = {key: one.record() for key, one in ranges.items()}
        ladder = self._ladder
        self._baseline = self._baseline_of(varied, self.rounds.first) if ladder is None else ladder.row
        self._folder: StudyFolder | None = None
        self._record: StudyRecord | None = None
        self._registered: Registration | None = None
        self._is_registered = False

    @property
    def folder(self) -> StudyFolder:
        """Study folder, known after `plan`."""
        assert self._folder is not None
        return self._folder

    @property
    def arguments(self) -> str:
        """Command-line arguments for other verbs: the study's name, and `paths.runs` unless that is `runs/`."""
        runs = self.folder.path.parent
        return self.folder.path.name + ("" if runs == Path.cwd() / "runs" else f" paths.runs={runs}")

    def plan(self, sweep_plan: SweepPlan, dropped: str = "") -> None:
        """Build the study record from a sweep plan. Raises UserError if its runs would be in several folders, or the
        question differs from the one registered, at which somebody may have looked."""
        parents = {entry.path.parent for entry in sweep_plan.planned}
        if len(parents) > 1:
            same = "so experiment.name and paths.runs must be the same at every point. Remove them from the axes"
            raise UserError(f"{self.study.path}: the runs of a study share one folder, {same}.")
        self._folder = StudyFolder(parents.pop())
        if all(entry.plan.experiment.evaluation.enabled for entry in sweep_plan.planned):
            for metric in self.study.metrics:
                require_logged(metric, sweep_plan, by_all=False)
        if not self._is_registered:
            self._registered, self._is_registered = self._registration(sweep_plan), True
        order = {(point.variant, point.seed): index for index, point in enumerate(self.rounds.first)}
        planned = sorted(
            (*sweep_plan.planned, *sweep_plan.duplicates),
            key=lambda entry: (entry.point.round, order.get((entry.point.variant, entry.point.seed), 0)),
        )
        lists = {axis.name: axis.keys for axis in self.study.axes if axis.name}
        ladder = self._ladder
        lists |= {} if ladder is None else {RUNG: ladder.keys}
        record = StudyRecord(
            name=self.study.name,
            question=self.study.question,
            size=self.size,
            typed=self._typed,
            baseline=self._baseline,
            metrics=self.study.metrics,
            points=tuple(self._study_run(entry, lists) for entry in planned),
            lists=lists,
            skipped={entry.point.label: entry.reason for entry in sweep_plan.skipped},
            rounds=self.rounds.record(),
            parameters=self._parameters,
            tune=self.study.tune or "",
            registered=self._registered,
            dropped=dropped,
            ladder=None if ladder is None else LadderRecord(ladder.metric, ladder.better, ladder.arm, len(ladder.all)),
        )
        self._record = self._folder.with_earlier(record, lambda run: self._in_file(run.overrides, {*run.typed}))

    def record(self, sweep_plan: SweepPlan, echo: Callable[[str], None]) -> None:
        """Write the study record before any run starts, and report removed points. Raises UserError."""
        assert self._record is not None
        with explain_write_errors(self.folder.path):
            self._record = self.folder.write(self._record, self.study.path.read_text(encoding="utf-8"))
        self.report_changes(sweep_plan, echo)

    def enter(self, sweep_plan: SweepPlan, dropped: str, echo: Callable[[str], None]) -> None:
        """Enter the standing of the registered question into the ledger, after the study record. After an error the
        runs go on: `compare --discoveries` states no rate while a recorded question is missing."""
        if (standing := self.rounds.standing(sweep_plan, dropped)) is None:
            return
        runs = self.folder.path.parent
        try:
            enter(runs, standing.question(self.folder.path.name))
        except (OSError, UserError) as error:
            why = error if isinstance(error, UserError) else error.strerror or error
            until = f"titan-exp sweep {self.arguments} can enter it"
            said = f"Cannot enter the question into {runs / LEDGER} ({why})"
            echo(f"{said}. The runs go on, but do not count among the discoveries until {until}.")

    def report_changes(self, sweep_plan: SweepPlan, echo: Callable[[str], None]) -> None:
        """Report a missing baseline, and active runs that the study no longer contains."""
        variants = {entry.point.variant for entry in (*sweep_plan.planned, *sweep_plan.duplicates)}
        if self._baseline is not None and self._baseline not in variants:
            echo(f"The baseline {self._baseline} cannot run here, so the comparison will have no baseline.")
        elif self._baseline is None and self.study.baseline is not None:
            echo("What you typed excludes the baseline of the study, so the comparison will have none.")
        if removed := self._still_active():
            echo(f"\nThe study no longer has {format_items(len(removed), 'active run')}. To cancel them, add --prune:")
            for run in removed:
                echo(f"  {run.label}  {run.run_id}")

    def prune(self, echo: Callable[[str], None], *, ask: bool) -> None:
        """Cancel active runs that the study no longer contains; with `ask`, after confirmation."""
        if not (removed := self._still_active()):
            echo("The study still has all active runs, so there is none to cancel.")
            return
        question = f"Cancel {'it' if len(removed) == 1 else f'these {len(removed)} runs'}?"
        if ask and not sys.stdin.isatty():
            raise UserError(f"{question} There is no terminal to answer at, so add --yes.")
        if ask and input(f"{question} [y/N] ").strip().lower() not in ("y", "yes"):
            echo("We cancelled nothing.")
            return
        cancel_runs([self.folder.run(run) for run in removed], {run.run_id: run.label for run in removed}, echo)

    def stop_requested(self) -> bool:
        """True if `titan-exp cancel` requested a stop."""
        return self.folder.stop.exists()

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the study lock for the block. Raises UserError if another process holds it."""
        with explain_write_errors(self.folder.path), FileLock(self.folder.lock) as lock:
            try:
                lock.acquire("sweep", timeout=0.5)
            except LockedError as error:
                what = f"{self.folder.path}: this study is already running ({error.holder or 'another process'})"
                see = (
                    f"See it with titan-exp status {self.arguments}, or stop it with titan-exp cancel {self.arguments}"
                )
                raise UserError(f"{what}. {see}.") from None
            self.folder.stop.unlink(missing_ok=True)
            yield

    def _registration(self, sweep_plan: SweepPlan) -> Registration | None:
        """Question to be recorded: as registered before, unless it has changed before the first look."""
        now, before = self.rounds.registration, self.folder.read()
        earlier = None if before is None else before.registered
        known = [(point.seed, self.folder.run(point)) for point in before.points] if before and earlier else []
        if not earlier and now:
            known = [(entry.point.seed, entry.plan.folder) for entry in sweep_plan.planned]
        looks = _complete_pairs(known)
        changes = [] if before is None or earlier is None else self._changes(sweep_plan, before, now, earlier)
        if changes and looks and not self._change_question:
            path, name = self.study.path, self.study.name
            raise UserError(
                f"{path}: the registered question was changed, and {format_items(looks, 'pair')} of it can be looked "
                "at already, so that its error rate would be void.\n"
                + "".join(f"  {change}\n" for change in changes)
                + f"Undo the change. Or ask another question, which draws pairs of its own: cp {path} "
                f"sweeps/{name}_2.yaml; titan-exp sweep {name}_2. titan-exp sweep {name} --change-question goes on "
                "with these pairs, and every page will say that there is no error rate."
            )
        if now is None:
            return None
        # A question that nobody can have looked at may be changed, and counts once.
        now = replace(now, id=(earlier.id if earlier else "") or secrets.token_hex(6))
        if earlier is not None and not changes:
            now = replace(earlier, id=now.id)
        elif earlier is not None and looks:
            now = replace(now, time=earlier.time, changed=(*earlier.changed, *changes))
        else:
            late = (f"registered after {format_items(looks, 'pair')} had been trained",) if looks else ()
            now = replace(now, time=time.time(), changed=late)
        self.rounds.registration = now
        return now

    def _changes(
        self, sweep_plan: SweepPlan, before: StudyRecord, now: Registration | None, earlier: Registration
    ) -> list[str]:
        """Changes of the registered question. Those of configurations are by key, as far as the runs' folders tell."""
        if now is None:
            return ["pairs: removed"]

        def effective(config: Mapping[str, Any]) -> dict[str, Any]:
            return {key: value for key, value in flatten(config).items() if has_effect(key) and key != SEED}

        arms: dict[str, list[str]] = {}
        for old, new in ((earlier.candidate, now.candidate), (earlier.baseline, now.baseline)):
            runs = [self.folder.run(point) for point in before.points if point.variant == old]
            present = next(entry.plan.experiment for entry in sweep_plan.planned if entry.point.variant == new)
            for folder in [folder for folder in runs if folder.config.exists()][:1]:
                for line in differences(effective(Run(folder).config), effective(to_dict(present))):
                    arms.setdefault(line.strip(), []).append(new)
        return now.changes(earlier, [line if len(who) > 1 else f"{who[0]}: {line}" for line, who in arms.items()])

    def _still_active(self) -> list[StudyRun]:
        assert self._record is not None
        now = run_statuses([self.folder.run(run) for run in self._record.removed])
        return [run for run in self._record.removed if now[self.folder.run(run).path].active]

    @property
    def _ladder(self) -> LadderRounds | None:
        return self.rounds if isinstance(self.rounds, LadderRounds) else None

    def _rounds(self, study: Study, fixed: Sequence[str]) -> Rounds:

        def better(metric: str | None) -> Direction:
            return study.better(metric or "") or "min"

        search, halving, size = study.search, study.halving, self.size
        if study.ladder is not None:
            arms = study_points(study, size, fixed)
            return LadderRounds(study, arms, self._baseline_of(study, arms), self._compose)
        if study.pairs is not None:
            from titan_exp.launch.sweep.looks import looks_of  # imports NumPy, which other studies need not

            return looks_of(study, size, fixed, better(study.pairs.metric))
        if search is not None and search.method == "optuna":
            return Batches(search, better(search.metric), lambda choices: study_points(study, size, fixed, choices))
        points = study_points(study, size, fixed, () if search is None else drawn_choices(search))
        return Rounds(points) if halving is None else Rungs(points, halving, better(halving.metric))

    def _baseline_of(self, study: Study, points: Sequence[Point]) -> str | None:
        """Baseline variant; None if the typed overrides exclude it."""
        try:
            return baseline_of(study, points)
        except UserError:
            if not self._typed:
                raise
            return None

    def _in_file(self, overrides: Sequence[str], typed: Set[str] = frozenset()) -> bool:
        """True if the study's file has a point. The parent of a ladder's branch is found by its trunk."""
        of_ladder = self._ladder is not None
        return self._file.has([text for text in overrides if not (of_ladder and text.startswith(f"{PARENT}="))], typed)

    @cached_property
    def _file(self) -> FilePoints:
        """Points of the study's file. Those that Optuna proposes depend on results, so the file has all of them."""
        study, search = self.study, self.study.search
        if study.ladder is not None:
            rounds = self._rounds(study, ())
            return FilePoints(rounds.all if isinstance(rounds, LadderRounds) else ())
        if search is not None and search.method == "optuna":
            study, search = replace(study, search=None), None
        return FilePoints(study_points(study, self.size, (), drawn_choices(search) if search else ()))

    def _study_run(self, entry: PlannedPoint, lists: Iterable[str]) -> StudyRun:
        point, plan = entry.point, entry.plan
        of_file = not self._typed or self._in_file(point.overrides)
        return StudyRun(
            label=point.label,
            variant=point.variant,
            seed=point.seed,
            run_id=plan.run_id,
            experiment_id=plan.experiment_id,
            processes=plan.layout.world_size,
            steps=plan.experiment.training.last_step,
            kind=plan.experiment.cluster.kind,
            overrides=point.overrides,
            round=point.round,
            rung=point.rung,
            choices={name: point.facts[name] for name in lists if name in point.facts},
            typed=() if of_file else tuple(split_override(text)[0] for text in self._typed),
        )


def cancel_runs(
    folders: Sequence[RunFolder],
    labels: dict[str, str],
    echo: Callable[[str], None],
    reason: str = "titan-exp cancel",
) -> dict[Path, str]:
    """Cancel runs through their executors; `reason` goes into their attempts. Prints each result under its label from
    `labels`, keyed by run id, and returns it by folder. It begins with `NOT_CANCELLED` if the run is left as it is."""
    results: dict[Path, str] = {}
    by_kind: dict[str, list[RunFolder]] = {}
    for folder in folders:
        by_kind.setdefault(last_executor(folder), []).append(folder)
    for kind, of_kind in by_kind.items():
        done = executor_for(kind).cancel(of_kind, reason=reason)
        for folder in of_kind:
            line = done.get(folder.path, "nothing was done")
            results[folder.path] = line
            echo(f"{labels.get(folder.path.name, folder.path.name)}: {line}")
    return results


def _complete_pairs(runs: Iterable[tuple[int | None, RunFolder]]) -> int:
    """Number of seeds with two runs that are done or have diverged, whose difference anybody can read."""
    ended = Counter[int | None]()
    for seed, folder in runs:
        state = folder.read_state()
        ended[seed] += state is not None and (state.state == "done" or has_diverged(state.state, state.reason))
    return sum(count > 1 for count in ended.values())
