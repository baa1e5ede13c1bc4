"""A study that is being launched: its file, its points as planned, and the folder of its runs."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hydra.core.override_parser.types import Override

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.hydra.compose import default_overrides
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.study.points import baseline_of, chosen_size, narrowed, study_points
from titan_exp.config.study.study import Study
from titan_exp.launch.executor import executor_for, last_executor
from titan_exp.launch.run_plan import explain_write_errors
from titan_exp.launch.state.run_status import run_statuses
from titan_exp.launch.state.study_folder import StudyFolder, StudyRecord, StudyRun
from titan_exp.launch.sweep.sweep_plan import PlannedPoint, Point, SweepPlan
from titan_exp.tracking.run_folder.file_lock import FileLock
from titan_exp.tracking.run_folder.run_folder import LockedError, RunFolder


class StudySweep:
    """A study with a size and with the overrides that were typed.

    Args:
        study: the file's content.
        size: the size that was asked for; None takes the first.
        typed: overrides of the command line, laid over the study.

    Raises:
        UserError: there is no such size, or the overrides leave no points or change what belongs together.
    """

    def __init__(self, study: Study, size: str | None, typed: Sequence[Override]) -> None:
        self.study = study
        """The file's content."""
        self.size = chosen_size(study, size)
        """The size that was chosen; empty where there is none."""
        leave_out = default_overrides()
        texts = (str(override.input_line) for override in typed)
        self._typed = tuple(text for text in texts if text not in leave_out)
        varied, fixed = narrowed(study, typed)
        self._points = study_points(varied, self.size, fixed)
        self._baseline: str | None = None
        try:
            self._baseline = baseline_of(varied, self._points)
        except UserError:
            if not self._typed:
                raise
            # What was typed may leave it out; the study then has none.
        self._folder: StudyFolder | None = None
        self._record: StudyRecord | None = None

    @property
    def points(self) -> list[Point]:
        """Its points, the excluded ones too."""
        return [
            Point(point.overrides, point.label, point.variant, point.seed, point.excluded) for point in self._points
        ]

    @property
    def folder(self) -> StudyFolder:
        """The folder of its runs, known once they are planned."""
        assert self._folder is not None
        return self._folder

    @property
    def words(self) -> str:
        """Arguments that name it for other verbs: its folder's name, and `paths.runs` unless that is `runs/`."""
        runs = self.folder.path.parent
        return self.folder.path.name + ("" if runs == Path.cwd() / "runs" else f" paths.runs={runs}")

    def plan(self, sweep_plan: SweepPlan) -> None:
        """Take in what was planned.

        Raises:
            UserError: its runs would lie in several folders.
        """
        parents = {one.plan.folder.path.parent for one in sweep_plan.planned}
        if len(parents) > 1:
            raise UserError(
                f"{self.study.path}: the runs of a study lie in one folder, so experiment.name and paths.runs are the "
                "same at every point. Take them out of the axes."
            )
        self._folder = StudyFolder(parents.pop())
        self._record = StudyRecord(
            name=self.study.name,
            question=self.study.question,
            size=self.size,
            typed=self._typed,
            baseline=self._baseline,
            metrics=self.study.metrics,
            points=tuple(
                self._run(one) for one in _in_order([*sweep_plan.planned, *sweep_plan.duplicates], self._points)
            ),
            skipped={one.point.label: one.reason for one in sweep_plan.skipped},
        )

    def record(self, sweep_plan: SweepPlan, echo: Callable[[str], None]) -> None:
        """Write the study down, before any of its runs is started, and say what it no longer holds.

        Raises:
            UserError: the folder cannot be written to.
        """
        assert self._record is not None
        with explain_write_errors(self.folder.path):
            self._record = self.folder.write(self._record, self.study.path.read_text(encoding="utf-8"))
        self.report_changes(sweep_plan, echo)

    def report_changes(self, sweep_plan: SweepPlan, echo: Callable[[str], None]) -> None:
        """Say where the baseline is missing, and which runs still wait or run that the study no longer holds."""
        variants = {one.point.variant for one in (*sweep_plan.planned, *sweep_plan.duplicates)}
        if self._baseline is not None and self._baseline not in variants:
            echo(f"The baseline, {self._baseline}, cannot run here: there will be nothing to compare with.")
        elif self._baseline is None and self.study.baseline is not None:
            echo("What was typed leaves the study's baseline out: there will be nothing to compare with.")
        removed = self._still_active()
        if removed:
            echo(f"\n{len(removed)} run(s) still wait or run that the study no longer holds; --prune cancels them:")
            for run in removed:
                echo(f"  {run.label}  {run.run_id}")

    def prune(self, echo: Callable[[str], None], *, ask: bool) -> None:
        """Cancel runs that wait or run and that the study no longer holds.

        Args:
            say: shows a line.
            ask: have it confirmed first.

        Raises:
            UserError: the scheduler does not answer.
        """
        removed = self._still_active()
        if not removed:
            echo("No run waits or runs that the study no longer holds.")
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
        """Be the one process that runs the study's points on this machine.

        Raises:
            UserError: another process does.
        """
        with explain_write_errors(self.folder.path), FileLock(self.folder.lock) as lock:
            try:
                lock.acquire("sweep", timeout=0.5)
            except LockedError as error:
                who = error.holder or "another process"
                raise UserError(
                    f"{self.folder.path}: this study is being run already, by {who}. "
                    f"titan-exp status {self.words} shows it, titan-exp cancel {self.words} stops it."
                ) from None
            self.folder.stop.unlink(missing_ok=True)
            yield

    def _run(self, one: PlannedPoint) -> StudyRun:
        experiment = one.plan.experiment
        return StudyRun(
            label=one.point.label,
            variant=one.point.variant,
            seed=one.point.seed,
            run_id=one.plan.run_id,
            experiment_id=one.plan.experiment_id,
            processes=ResolvedLayout.of(experiment).world_size,
            steps=experiment.training.steps,
            kind=experiment.cluster.kind,
            overrides=one.point.overrides,
        )

    def _still_active(self) -> list[StudyRun]:
        """Runs that the study held once, and that wait or run."""
        before = self.folder.read() if self.folder.json.exists() else None
        if before is None or self._record is None:
            return []
        held = {point.run_id for point in self._record.points}
        gone = {run.run_id: run for run in (*before.removed, *before.points) if run.run_id not in held}
        now = run_statuses([self.folder.run(run) for run in gone.values()])
        return [run for run in gone.values() if now[self.folder.run(run).path].active]


def cancel_runs(folders: Sequence[RunFolder], labels: dict[str, str], echo: Callable[[str], None]) -> None:
    """Have runs cancelled by whoever carries them out, and say of each what was done.

    Args:
        folders: of the runs.
        labels: what each is called, by run id.
        say: shows a line.
    """
    by_kind: dict[str, list[RunFolder]] = {}
    for folder in folders:
        by_kind.setdefault(last_executor(folder), []).append(folder)
    for kind, of_kind in by_kind.items():
        done = executor_for(kind).cancel(of_kind, reason="titan-exp cancel")
        for folder in of_kind:
            label = labels.get(folder.path.name, folder.path.name)
            echo(f"{label}: {done.get(folder.path, 'nothing was done')}")


def _in_order(planned: Sequence[PlannedPoint], points: Sequence[object]) -> list[PlannedPoint]:
    labels = {getattr(point, "label", ""): place for place, point in enumerate(points)}
    return sorted(planned, key=lambda one: labels[one.point.label])


def _confirmed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UserError(f"{question} There is no terminal to answer on: add --yes.")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
