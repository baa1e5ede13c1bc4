"""Runs on this machine: one after another with their progress shown, or several side by side, each on its own cores."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.executor import JobStatus, Submission
from titan_exp.launch.local.concurrent_runs import ConcurrentRuns
from titan_exp.launch.run_console import RunConsole
from titan_exp.launch.run_plan import RunPlan
from titan_exp.launch.run_plans import INTERRUPTED, run
from titan_exp.launch.summary import describe, summarize
from titan_exp.tracking.run_folder.run_folder import RunFolder


class LocalExecutor:
    """Carries runs out here and waits for each.

    Args:
        jobs: how many run at a time.
        title: what a run is called; its folder's path by default.
        stopped: asked before each start: whether nothing more shall be started.
    """

    def __init__(
        self,
        *,
        jobs: int = 1,
        title: Callable[[RunPlan], str] = lambda plan: str(plan.folder.path),
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.interrupted = False
        """Whether Ctrl-C, or whoever asked to, stopped the rest."""
        self.worst = 0
        """The exit code: 0 where all are done, 130 after Ctrl-C, 1 where a run failed, 85 where one stopped."""
        self._jobs, self._title, self._stopped = jobs, title, stopped

    def submit(self, plans: Sequence[RunPlan], *, say: Callable[[str], None]) -> list[Submission]:
        """Run what is not done, nor running already, whatever becomes of each; none after Ctrl-C."""
        found: dict[int, Submission] = {}
        waiting: list[tuple[int, RunPlan]] = []
        for number, plan in enumerate(plans):
            before = _before(plan)
            if before is None:
                waiting.append((number, plan))
            else:
                found[number] = before
                told = "done already" if before.outcome == "done" else before.reason
                say(f"[{number + 1}/{len(plans)}] {self._title(plan)}: {told}")
        carry_out = self._one_by_one if self._jobs == 1 or len(waiting) < 2 else self._side_by_side
        carry_out(waiting, found, len(plans), say)
        return [found[number] for number in sorted(found)]

    def status(self, folders: Sequence[RunFolder]) -> Mapping[Path, JobStatus]:
        """Whether a process on this machine holds each run."""
        holders = {folder.path: folder.holder() for folder in folders}
        return {
            path: JobStatus("gone") if holder is None else JobStatus("running", str(holder.pid), str(holder))
            for path, holder in holders.items()
        }

    def cancel(self, folders: Sequence[RunFolder], *, reason: str) -> Mapping[Path, str]:
        """Ask running ones to save and stop. Waiting ones are the sweep's, which is asked by its own folder."""
        said: dict[Path, str] = {}
        for folder in folders:
            holder = folder.holder()
            if holder is None:
                said[folder.path] = "nothing runs"
            else:
                folder.request_stop(reason)
                said[folder.path] = f"asked to save and stop ({holder})"
        return said

    def _one_by_one(
        self,
        waiting: Sequence[tuple[int, RunPlan]],
        found: dict[int, Submission],
        total: int,
        say: Callable[[str], None],
    ) -> None:
        console = RunConsole()
        for number, plan in waiting:
            if self.interrupted or self._stopped():
                self._note(INTERRUPTED)
                return
            say(f"\n[{number + 1}/{total}] {self._title(plan)}")
            try:
                outcome = run(plan, console=console)
            except UserError as error:
                console.error(str(error))
                found[number] = Submission(plan, "refused", reason=str(error))
                self._note(error.exit_code)
            except KeyboardInterrupt:
                self._note(INTERRUPTED)
            else:
                found[number] = Submission(plan, _ending(outcome.summary.state), reason=_reason(plan.folder))
                self._note(outcome.exit_code)

    def _side_by_side(
        self,
        waiting: Sequence[tuple[int, RunPlan]],
        found: dict[int, Submission],
        total: int,
        say: Callable[[str], None],
    ) -> None:
        numbers = {plan.folder.path: number for number, plan in waiting}

        def begun(plan: RunPlan) -> None:
            say(f"[{numbers[plan.folder.path] + 1}/{total}] {self._title(plan)}: started, {plan.folder.path}")

        def ended(plan: RunPlan, code: int, refusal: str | None) -> None:
            number = numbers[plan.folder.path]
            summary = summarize(plan.folder)
            told = refusal or describe(summary, plan.experiment.training.steps)
            reason = refusal or _reason(plan.folder)
            say(f"[{number + 1}/{total}] {self._title(plan)}: {told}")
            if summary.state == "failed" and refusal is None:
                say(f"    {reason or f'exit code {code}'}\n    titan-exp logs {plan.folder.path}")
            found[number] = Submission(plan, "refused" if refusal else _ending(summary.state), reason=reason)
            self._note(code)

        side_by_side = ConcurrentRuns(self._jobs, begun=begun, ended=ended, stopped=self._stopped)
        self.interrupted = side_by_side.run([plan for _, plan in waiting], say)
        if self.interrupted:
            self._note(INTERRUPTED)

    def _note(self, code: int) -> None:
        if code == INTERRUPTED:
            self.interrupted = True
        order = (0, 85, 1, INTERRUPTED)
        code = code if code in order else 1
        self.worst = max(self.worst, code, key=order.index)


def _before(plan: RunPlan) -> Submission | None:
    """A run that needs no start: it is done, or it runs already."""
    if not plan.folder.path.exists():
        return None
    state = plan.folder.read_state()
    if state is not None and state.state == "done":
        return Submission(plan, "done")
    holder = plan.folder.holder()
    return None if holder is None else Submission(plan, "running", reason=f"runs already ({holder}), and is left alone")


def _ending(state: str) -> Literal["done", "failed", "preempted"]:
    return state if state in ("done", "preempted") else "failed"


def _reason(folder: RunFolder) -> str | None:
    state = folder.read_state()
    return None if state is None or state.state == "done" else state.reason
