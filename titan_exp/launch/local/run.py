"""Local run: create or find the folder, start the ranks, show progress, close the attempt.

Repeating the command resumes the run in its folder, or reports that it is done.

`python -m titan_exp.launch.local.run RUN_FOLDER [--prediction]` is the launcher of a concurrent run; with the flag,
plan.json is read from standard input.
"""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from titan_exp.config.command_line.output import safe_output
from titan_exp.config.errors.user_error import UserError
from titan_exp.launch import attempt_end
from titan_exp.launch.executor import Processes, several_worlds
from titan_exp.launch.local.ranks import LocalRanks
from titan_exp.launch.provenance import report_large_patch
from titan_exp.launch.run_console import Interrupts, RunConsole, Summary, describe, summarize
from titan_exp.launch.run_plan import RunPlan, create_run_folder, explain_write_errors, plan_relaunch, refresh_snapshot
from titan_exp.tracking.run_folder.files import FileLock, FileTail
from titan_exp.tracking.run_folder.folder_owner import FolderWatch
from titan_exp.tracking.run_folder.metrics_jsonl import rows_of
from titan_exp.tracking.run_folder.run import DIED_UNRECORDED, SWEEP_GONE
from titan_exp.tracking.run_folder.run_folder import FAILED, RunFolder, RunState, shown_state

POLL_INTERVAL = 0.1
"""Seconds between polls of the ranks and their files."""
WARNING_INTERVAL = 1.0
"""Seconds between reads of the run's warning."""
INTERRUPTED = 130
"""Exit code after Ctrl-C."""
PREDICTION_FLAG = "--prediction"


@dataclass(frozen=True)
class RunOutcome:
    """Result of `run`."""

    exit_code: int
    """0 done, 130 stopped by a signal to the launcher, 85 stopped otherwise; 86 hung, 2 UserError, 1 other failure."""
    summary: Summary


def run(plan: RunPlan, *, console: RunConsole | None = None, sweep: int | None = None) -> RunOutcome:
    """Run a plan to its end, or report that it is done. `sweep` is the parent process if that is a sweep, whose death
    the run lock then shows. Raises UserError if its folder cannot be written or another process runs it."""
    console = console or RunConsole()
    existed = create_run_folder(plan)
    if not existed:
        report_large_patch(plan.folder, console.echo)
    if (done := _if_done(plan, console)) is not None:  # this needs no lock, which another user's run would refuse
        return done
    with explain_write_errors(plan.folder.path), attempt_end.acquire_run(plan.folder, "launcher", console.echo) as lock:
        if (done := _if_done(plan, console)) is not None:
            return done
        attempt = _open_attempt(plan, plan.folder.read_state(), console, renew=existed)
        execution = _Execution(plan, attempt, console, lock, sweep)
        result = execution.run()
    summary = replace(summarize(execution.folder), state=result.state, reason=result.reason)
    _report(replace(plan, folder=execution.folder), summary, result, console)
    stopped_by_signal = result.state == "preempted" and execution.interrupts.first is not None
    return RunOutcome(INTERRUPTED if stopped_by_signal else result.exit_code, summary)


def _if_done(plan: RunPlan, console: RunConsole) -> RunOutcome | None:
    """Report a run that is done and return its outcome; None for any other run."""
    state = plan.folder.read_state()
    if state is None or state.state != "done":
        return None
    summary = summarize(plan.folder)
    console.echo(f"{describe(summary, plan.experiment.training.last_step)}: {plan.folder.path}")
    console.echo(
        "This run is already done, so nothing starts. To run it again, change experiment.seed or experiment.name, or "
        "remove its folder."
    )
    return RunOutcome(0, summary)


def _open_attempt(plan: RunPlan, state: RunState | None, console: RunConsole, *, renew: bool) -> int:
    """Record the intent to start; returns the attempt number. With `renew`, or after another attempt, the folder gets
    the present code first."""
    folder, worlds = plan.folder, plan.layout.cluster.worlds
    size = plan.layout.world_size * worlds
    last = state.attempt if state else 0
    attempt_end.close_dead_attempts(folder)
    if renew or last:
        refresh_snapshot(plan, last)
    attempt = folder.add_attempt(world_size=size, hosts=[socket.gethostname()]).attempt
    # A rank of the previous attempt that is still starting either sees this row and exits, or we wait for it here.
    attempt_end.wait_for_orphans(folder, console.echo)
    folder.clear_stop()
    folder.write_state(RunState("running", state.step if state else 0, time.time(), attempt, None))
    processes = "1 process" if size == 1 else f"{size} processes"
    processes += "" if worlds == 1 else f" in {worlds} {several_worlds().noun}s"
    if last and state is not None:
        previous = state.reason or (DIED_UNRECORDED if state.state in ("running", "pending") else state.state)
        console.echo(f"{folder.path}: attempt {attempt}, {processes}, after attempt {last} ({previous})")
    else:
        console.echo(f"{folder.path}: {processes}")
    return attempt


class _Execution:
    """Executes and monitors one attempt."""

    def __init__(
        self, plan: RunPlan, attempt: int, console: RunConsole, lock: FileLock, sweep: int | None = None
    ) -> None:
        self.plan, self.folder, self.attempt, self.console = plan, plan.folder, attempt, console
        self.lock, self.sweep = lock, sweep
        supervise = LocalRanks if plan.layout.cluster.worlds == 1 else several_worlds().supervise
        self.ranks: Processes = supervise(plan.layout, plan.folder, attempt)
        self.metrics = FileTail(plan.folder.metrics, from_now=True)
        self.log = FileTail(self.ranks.log(0))
        self._next_warning = 0.0
        self.interrupts = Interrupts()
        self.folder_watch = FolderWatch(plan.folder.path)

    def run(self) -> attempt_end.AttemptResult:
        """Start, monitor and close the attempt."""
        result = attempt_end.AttemptResult("failed", 1, "the launcher failed")
        try:
            with self.interrupts:
                self.ranks.start()
                self.folder.update_attempt(self.attempt, job_id=self.ranks.job_id, start=time.time())
                self.console.open(self._title(), self.plan.experiment.training)
                result = self._follow()
        finally:
            self.ranks.close()
            self.console.close(shown_state(result.state, result.reason))
            self._close(result)
            self.folder_watch.close()
        return result

    def _close(self, result: attempt_end.AttemptResult) -> None:
        moved = self.folder_watch.moved_to()
        if moved is not None:
            self.folder = RunFolder(moved)
        if not self.folder_watch.holds(self.folder.path) or not self.folder.config.exists():
            return  # the folder was deleted, and another run may have begun at its path
        try:
            attempt_end.close_attempt(self.folder, self.attempt, result)
        except OSError as error:
            # The exit code must still be returned; the next start closes the attempt.
            self.console.error(f"Cannot write {self.folder.state} ({error.strerror}).")

    def _follow(self) -> attempt_end.AttemptResult:
        stopping, interrupts = False, self.interrupts
        while not self.ranks.poll():
            loss = self.folder_watch.loss()
            if loss is not None:
                self.ranks.kill()
                return attempt_end.AttemptResult("failed", FAILED, loss)
            if self.sweep not in (None, os.getppid()):
                self.lock.rename(SWEEP_GONE)
                self.sweep = None
            if interrupts.first and not stopping:
                stopping = True
                self.folder.request_stop(f"the launcher received {interrupts.first}")
                first = (
                    "stops after this step, and saves nothing" if _saves_nothing(self.plan) else "saves its state first"
                )
                self.console.echo(f"Stopping: the run {first}. Press Ctrl-C again to end at once.")
            if interrupts.again:
                self.ranks.kill()
                self._show()
                return attempt_end.AttemptResult(
                    "preempted", INTERRUPTED, f"killed at the second signal, after {interrupts.first}"
                )
            self._show()
            time.sleep(POLL_INTERVAL)
        self._show()
        result = self.ranks.result()
        loss = self.folder_watch.confirmed_loss() if result.state == "failed" else None
        return result if loss is None else attempt_end.AttemptResult("failed", FAILED, loss)

    def _show(self) -> None:
        self.console.log_lines(self.log.lines())
        for row in rows_of(self.metrics.lines(), self.attempt):
            self.console.row(row)
        for line in self.ranks.news():
            self.console.echo(line)
        if time.monotonic() >= self._next_warning:
            self._next_warning = time.monotonic() + WARNING_INTERVAL
            with contextlib.suppress(UserError):  # an unreadable file
                self.console.warn(self.folder.warning())

    def _title(self) -> str:
        return f"{self.plan.experiment.experiment.name}/{self.plan.run_id}"


def _report(plan: RunPlan, summary: Summary, result: attempt_end.AttemptResult, console: RunConsole) -> None:
    if result.state == "failed":
        # A UserError and an Outcome explain themselves; other failures show their traceback.
        first = result.detail.strip().partition("\n")[0]
        explained = result.exit_code == UserError.exit_code or (first and (result.reason or "").endswith(f": {first}"))
        text = result.detail if explained else f"{result.detail}\n{result.reason}"
        console.error(text.strip())
    if plan.folder.path.exists():
        console.echo(f"{describe(summary, plan.experiment.training.last_step)}: {plan.folder.path}")
    if result.state == "preempted":
        begins = "begin it again, as it saves nothing (checkpoint.mode=off)" if _saves_nothing(plan) else "continue it"
        console.echo(f"Type the same command to {begins}.")


def _saves_nothing(plan: RunPlan) -> bool:
    return plan.experiment.checkpoint.mode == "off"


def main(arguments: Sequence[str]) -> int:
    """Launch a run folder's ranks for the sweep that is the parent, and wait; returns the run's exit code."""
    sweep = os.getppid()
    folder, *rest = arguments or [""]
    if not folder or rest not in ([], [PREDICTION_FLAG]):
        print(f"usage: python -m titan_exp.launch.local.run RUN_FOLDER [{PREDICTION_FLAG}]", file=sys.stderr)
        return UserError.exit_code
    safe_output("utf-8", raw=True)
    prediction = sys.stdin.read() if rest else None
    try:
        plan = replace(plan_relaunch(RunFolder(Path(folder)), trust=True), prediction=prediction)
        return run(plan, sweep=sweep).exit_code
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
