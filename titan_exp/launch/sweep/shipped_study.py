"""Study sweep: study file, planned points and study folder."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from hydra.core.override_parser.types import Override

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.hydra.compose import default_overrides
from titan_exp.config.study.points import Point, baseline_of, chosen_size, narrowed, study_points
from titan_exp.config.study.study import Choice, Study
from titan_exp.launch.executor import NOT_CANCELLED, executor_for, last_executor
from titan_exp.launch.run_plan import explain_write_errors
from titan_exp.launch.state.run_lookup import StudyFolder, StudyRecord, StudyRun, removed_runs
from titan_exp.launch.state.run_status import run_statuses
from titan_exp.launch.sweep.rounds import Batches, Rounds, Rungs, drawn_choices
from titan_exp.launch.sweep.sweep_plan import PlannedPoint, SweepPlan
from titan_exp.tracking.run_folder.files import FileLock
from titan_exp.tracking.run_folder.run_folder import LockedError, RunFolder


class StudySweep:
    """Study at one size (None is the first), with overrides typed on the command line.

    Raises UserError if the size does not exist, or the overrides leave no points or split values that belong together.
    """

    def __init__(self, study: Study, size: str | None, typed: Sequence[Override]) -> None:
        self.study = study
        self.size = chosen_size(study, size)
        """Chosen size; empty if the study has none."""
        leave_out = default_overrides()
        texts = (str(override.input_line) for override in typed)
        self._typed = tuple(text for text in texts if text not in leave_out)
        varied, fixed = narrowed(study, typed)
        self.rounds = _rounds(varied, self.size, fixed)
        ranges = {} if varied.search is None else varied.search.ranges
        self._parameters = {key: one.record() for key, one in ranges.items()}
        self._baseline: str | None = None
        try:
            self._baseline = baseline_of(varied, self.rounds.first)
        except UserError:
            if not self._typed:
                raise
            # The typed overrides may exclude the baseline.
        self._folder: StudyFolder | None = None
        self._record: StudyRecord | None = None

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

    def plan(self, sweep_plan: SweepPlan) -> None:
        """Build the study record from a sweep plan. Raises UserError if its runs would be in several folders."""
        parents = {entry.plan.folder.path.parent for entry in sweep_plan.planned}
        if len(parents) > 1:
            raise UserError(
                f"{self.study.path}: the runs of a study share one folder, so experiment.name and paths.runs must be "
                "the same at every point. Remove them from the axes."
            )
        self._folder = StudyFolder(parents.pop())
        order = {(point.variant, point.seed): index for index, point in enumerate(self.rounds.first)}
        planned = sorted(
            (*sweep_plan.planned, *sweep_plan.duplicates),
            key=lambda entry: (entry.point.round, order.get((entry.point.variant, entry.point.seed), 0)),
        )
        lists = {axis.name: axis.keys for axis in self.study.axes if axis.name}
        self._record = StudyRecord(
            name=self.study.name,
            question=self.study.question,
            size=self.size,
            typed=self._typed,
            baseline=self._baseline,
            metrics=self.study.metrics,
            points=tuple(_study_run(entry, lists) for entry in planned),
            lists=lists,
            skipped={entry.point.label: entry.reason for entry in sweep_plan.skipped},
            rounds=self.rounds.record(),
            parameters=self._parameters,
            tune=self.study.tune or "",
        )

    def record(self, sweep_plan: SweepPlan, echo: Callable[[str], None]) -> None:
        """Write the study record before any run starts, and report removed points. Raises UserError if the folder
        cannot be written."""
        assert self._record is not None
        with explain_write_errors(self.folder.path):
            self._record = self.folder.write(self._record, self.study.path.read_text(encoding="utf-8"))
        self.report_changes(sweep_plan, echo)

    def report_changes(self, sweep_plan: SweepPlan, echo: Callable[[str], None]) -> None:
        """Report a missing baseline, and active runs that the study no longer contains."""
        variants = {entry.point.variant for entry in (*sweep_plan.planned, *sweep_plan.duplicates)}
        if self._baseline is not None and self._baseline not in variants:
            echo(f"The baseline {self._baseline} cannot run here, so the comparison will have none.")
        elif self._baseline is None and self.study.baseline is not None:
            echo("The typed overrides exclude the study's baseline, so the comparison will have none.")
        removed = self._still_active()
        if removed:
            echo(f"\n{len(removed)} active run(s) that the study no longer has; --prune cancels them:")
            for run in removed:
                echo(f"  {run.label}  {run.run_id}")

    def prune(self, echo: Callable[[str], None], *, ask: bool) -> None:
        """Cancel active runs that the study no longer contains; with `ask`, after confirmation."""
        removed = self._still_active()
        if not removed:
            echo("No active run has left the study, so nothing was cancelled.")
            return
        if ask and not _confirmed(f"Cancel {'it' if len(removed) == 1 else f'these {len(removed)} runs'}?"):
            echo("Nothing was cancelled.")
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
                raise UserError(
                    f"{self.folder.path}: this study is running already ({error.holder or 'another process'}). "
                    f"titan-exp status {self.arguments} shows it, titan-exp cancel {self.arguments} stops it."
                ) from None
            self.folder.stop.unlink(missing_ok=True)
            yield

    def _still_active(self) -> list[StudyRun]:
        """Active runs that the study no longer contains."""
        before = self.folder.read() if self.folder.json.exists() else None
        if before is None or self._record is None:
            return []
        removed = removed_runs(before, self._record)
        now = run_statuses([self.folder.run(run) for run in removed])
        return [run for run in removed if now[self.folder.run(run).path].active]


def cancel_runs(folders: Sequence[RunFolder], labels: dict[str, str], echo: Callable[[str], None]) -> bool:
    """Cancel runs through their executors; prints each result under its label from `labels`, keyed by run id. Returns
    True if every run was cancelled."""
    complete = True
    by_kind: dict[str, list[RunFolder]] = {}
    for folder in folders:
        by_kind.setdefault(last_executor(folder), []).append(folder)
    for kind, of_kind in by_kind.items():
        done = executor_for(kind).cancel(of_kind, reason="titan-exp cancel")
        for folder in of_kind:
            line = done.get(folder.path, "nothing was done")
            complete &= NOT_CANCELLED not in line
            echo(f"{labels.get(folder.path.name, folder.path.name)}: {line}")
    return complete


def _study_run(entry: PlannedPoint, lists: Iterable[str]) -> StudyRun:
    point, plan = entry.point, entry.plan
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
        choices={name: point.facts[name] for name in lists if name in point.facts},
        round=point.round,
    )


def _rounds(study: Study, size: str, fixed: Sequence[str]) -> Rounds:
    """Rounds of a study: of its search, or over its points."""

    def expand(proposed: Sequence[Choice]) -> list[Point]:
        return study_points(study, size, fixed, proposed)

    search, halving = study.search, study.halving
    if search is not None and search.method == "optuna":
        return Batches(search, study.better(search.metric or "") or "min", expand)
    points = expand(() if search is None else drawn_choices(search))
    return Rounds(points) if halving is None else Rungs(points, halving, study.better(halving.metric or "") or "min")


def _confirmed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UserError(f"{question} There is no terminal for the answer; add --yes.")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
