"""Local executor: runs on this machine, one after another, or several at a time on separate cores.

A local run creates or finds its folder, starts the ranks, shows progress and closes the attempt. Repeating the command
resumes the run in its folder, or reports that it is done. `python -m titan_exp.launch.local.executor RUN_FOLDER
[--prediction]` is the launcher of a concurrent run; with the flag, plan.json is read from standard input.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from titan_exp.config.command_line.output import safe_output
from titan_exp.config.errors.user_error import UserError
from titan_exp.launch import attempt_end
from titan_exp.launch.attempt_end import AttemptResult
from titan_exp.launch.executor import Executor, Processes, Submission, SubmitOptions, several_worlds
from titan_exp.launch.local.ranks import LocalRanks, submitit_rank
from titan_exp.launch.provenance import report_large_patch
from titan_exp.launch.rank.rank_env import ATTEMPT, RankInfo
from titan_exp.launch.run_console import Interrupts, RunConsole, Summary, describe, summarize
from titan_exp.launch.run_plan import RunPlan, create_run_folder, explain_write_errors, plan_relaunch, refresh_snapshot
from titan_exp.tracking.run_folder.files import FileLock, FileTail
from titan_exp.tracking.run_folder.folder_owner import FolderWatch
from titan_exp.tracking.run_folder.metrics_jsonl import rows_of
from titan_exp.tracking.run_folder.run import DIED_UNRECORDED, SWEEP_GONE
from titan_exp.tracking.run_folder.run_folder import FAILED, STOPPED, RunFolder, RunState, shown_state

POLL_INTERVAL = 0.1  # seconds between polls of processes and their files
WARNING_INTERVAL = 1.0
INTERRUPTED = 130  # exit code after Ctrl-C
LOG = "launcher.log"  # log file of the launcher of a concurrent run, in the run's log folder
PREDICTION_FLAG = "--prediction"


class LocalExecutor(Executor):
    """Runs on this machine and waits for each run. Ranks rendezvous through a file."""

    waits = True

    def submit(self, plans: Sequence[RunPlan], options: SubmitOptions) -> list[Submission]:
        """Run every plan to its end, even if others fail; none starts after Ctrl-C or a stop request."""
        results = {number: _existing(plan) for number, plan in enumerate(plans)}
        for number, submission in results.items():
            if submission is not None:
                text = "already done" if submission.outcome == "done" else submission.reason
                options.echo(f"[{number + 1}/{len(plans)}] {options.title(plans[number])}: {text}")
        waiting = [number for number, submission in results.items() if submission is None]
        if options.jobs == 1 or len(waiting) < 2:
            results |= _run_sequentially(plans, waiting, options)
        else:
            results |= _ConcurrentRuns(plans, waiting, options).run()
        code = STOPPED if options.stop_requested() else INTERRUPTED
        return [results[number] or Submission(plan, "not started", exit_code=code) for number, plan in enumerate(plans)]

    def launch(self, plan: RunPlan) -> Submission:
        outcome = run(plan)
        return _submission(plan, outcome.summary.state, outcome.exit_code)

    def rank_info(self) -> RankInfo | None:
        return submitit_rank() if ATTEMPT in os.environ else None


def _existing(plan: RunPlan) -> Submission | None:
    """Result of a run that is already done or running; None if it must be started."""
    if not plan.folder.path.exists():
        return None
    if plan.is_done:
        return Submission(plan, "done")
    holder = plan.folder.holder()
    return None if holder is None else Submission(plan, "running", reason=f"already running ({holder}), left alone")


def _submission(plan: RunPlan, state: str, code: int) -> Submission:
    outcome, recorded = state if state in ("done", "preempted") else "failed", plan.folder.read_state()
    reason = None if recorded is None or recorded.state == "done" else recorded.reason
    return Submission(plan, outcome, reason=reason, exit_code=code)


def _run_sequentially(
    plans: Sequence[RunPlan], waiting: Sequence[int], options: SubmitOptions
) -> dict[int, Submission | None]:
    console, results = RunConsole(), {}
    for number in waiting:
        plan = plans[number]
        if options.stop_requested():
            break
        options.echo(f"\n[{number + 1}/{len(plans)}] {options.title(plan)}")
        try:
            outcome = run(plan, console=console)
        except UserError as error:
            console.error(str(error))
            results[number] = Submission.refused(plan, str(error))
            continue
        except KeyboardInterrupt:
            break
        results[number] = _submission(plan, outcome.summary.state, outcome.exit_code)
        if outcome.exit_code == INTERRUPTED:
            break
    return results


class _ConcurrentRuns:
    """Runs up to `options.jobs` of the waiting plans at a time, each on its share of the cores."""

    def __init__(self, plans: Sequence[RunPlan], waiting: Sequence[int], options: SubmitOptions) -> None:
        self.plans, self.waiting, self.options = plans, list(waiting), options
        self.saves = any(plans[number].experiment.checkpoint.mode != "off" for number in waiting)
        self.results: dict[int, Submission | None] = {}
        self.running: dict[int, tuple[int, int, subprocess.Popen[bytes]]] = {}
        """Number of the plan, its attempts before, and its launcher, by share of the cores."""
        self.cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []

    def run(self) -> dict[int, Submission | None]:
        """Run all plans; none starts after a signal or a stop request."""
        forwarded = 0
        try:
            with Interrupts() as interrupts:
                while True:
                    self._collect()
                    stop = interrupts.first is not None or self.options.stop_requested()
                    for share in range(self.options.jobs):
                        if share not in self.running and self.waiting and not stop:
                            self._start(share, self.waiting.pop(0))
                    if not self.running and (stop or not self.waiting):
                        return self.results
                    signals = (interrupts.first is not None) + interrupts.again
                    if signals > forwarded:
                        forwarded = signals
                        first = "saves its state first" if self.saves else "stops after its step, and saves nothing"
                        self.options.echo(f"Stopping: every run {first}. Press Ctrl-C again to end them at once.")
                        # Launchers have their own process groups and receive no signal from the terminal.
                        for _, _, process in self.running.values():
                            process.send_signal(signal.SIGINT)
                    time.sleep(POLL_INTERVAL)
        finally:
            for _, _, process in self.running.values():  # only after an exception
                process.terminate()

    def _start(self, share: int, number: int) -> None:
        plan = self.plans[number]
        try:
            create_run_folder(plan)
            plan.folder.logs.mkdir(exist_ok=True)
            attempts = len(plan.folder.read_attempts())
            with (plan.folder.logs / LOG).open("ab") as log, tempfile.TemporaryFile() as prediction:
                command = [sys.executable, "-m", "titan_exp.launch.local.executor", str(plan.folder.path)]
                if plan.prediction is not None:
                    # Only the holder of the run lock, the launcher process, may write into an existing folder.
                    command.append(PREDICTION_FLAG)
                    prediction.write(plan.prediction.encode())
                    prediction.seek(0)
                process = subprocess.Popen(command, stdin=prediction, stdout=log, stderr=log, process_group=0)
        except (UserError, OSError) as error:
            self._end(number, Submission.refused(plan, str(error)), str(error))
            return
        self.running[share] = number, attempts, process
        if len(self.cores) >= self.options.jobs:  # before its imports; ranks inherit it
            os.sched_setaffinity(process.pid, self.cores[share :: self.options.jobs])
        self.options.echo(f"{self._heading(number)}: started in {plan.folder.path}")

    def _collect(self) -> None:
        for share, (number, attempts, process) in list(self.running.items()):
            if (code := process.poll()) is None:
                continue
            del self.running[share]
            plan = self.plans[number]
            summary = summarize(plan.folder)
            submission = _submission(plan, summary.state, code)
            said = describe(summary, plan.experiment.training.last_step)
            if code == -signal.SIGINT and len(plan.folder.read_attempts()) == attempts:
                # It came while the launcher was still importing.
                submission, said = Submission(plan, "not started", exit_code=INTERRUPTED), "stopped before it started"
            self._end(number, submission, said)

    def _end(self, number: int, submission: Submission, said: str) -> None:
        self.options.echo(f"{self._heading(number)}: {said}")
        if submission.outcome == "failed":
            reason = submission.reason or f"exit code {submission.exit_code}"
            self.options.echo(f"    {reason}\n    titan-exp logs {submission.plan.folder.path}")
        self.results[number] = submission

    def _heading(self, number: int) -> str:
        return f"[{number + 1}/{len(self.plans)}] {self.options.title(self.plans[number])}"


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
    if not plan.is_done:
        return None
    summary = summarize(plan.folder)
    console.echo(f"{describe(summary, plan.experiment.training.last_step)}: {plan.folder.path}")
    again = "To run it again, change experiment.seed or experiment.name, or remove its folder."
    console.echo(f"This run is already done, so nothing starts. {again}")
    return RunOutcome(0, summary)


def _open_attempt(plan: RunPlan, state: RunState | None, console: RunConsole, *, renew: bool) -> int:
    """Record the intent to start; returns the attempt number. With `renew`, or after another attempt, the folder gets
    the present code first."""
    folder, worlds = plan.folder, plan.layout.cluster.worlds
    size, last = plan.layout.world_size * worlds, state.attempt if state else 0
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
    def __init__(self, plan: RunPlan, attempt: int, console: RunConsole, lock: FileLock, sweep: int | None) -> None:
        self.plan, self.folder, self.attempt, self.console = plan, plan.folder, attempt, console
        self.lock, self.sweep = lock, sweep
        supervise = LocalRanks if plan.layout.cluster.worlds == 1 else several_worlds().supervise
        self.ranks: Processes = supervise(plan.layout, plan.folder, attempt)
        self.metrics = FileTail(plan.folder.metrics, from_now=True)
        self.log = FileTail(self.ranks.log(0))
        self._next_warning = 0.0
        self.interrupts = Interrupts()
        self.folder_watch = FolderWatch(plan.folder.path)

    def run(self) -> AttemptResult:
        """Start, monitor and close the attempt."""
        result = AttemptResult("failed", 1, "the launcher failed")
        try:
            with self.interrupts:
                self.ranks.start()
                self.folder.update_attempt(self.attempt, job_id=self.ranks.job_id, start=time.time())
                title = f"{self.plan.experiment.experiment.name}/{self.plan.run_id}"
                self.console.open(title, self.plan.experiment.training)
                result = self._follow()
        finally:
            self.ranks.close()
            self.console.close(shown_state(result.state, result.reason))
            self._close(result)
            self.folder_watch.close()
        return result

    def _close(self, result: AttemptResult) -> None:
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

    def _follow(self) -> AttemptResult:
        stopping, interrupts = False, self.interrupts
        while not self.ranks.poll():
            loss = self.folder_watch.loss()
            if loss is not None:
                self.ranks.kill()
                return AttemptResult("failed", FAILED, loss)
            if self.sweep not in (None, os.getppid()):
                self.lock.rename(SWEEP_GONE)
                self.sweep = None
            if interrupts.first and not stopping:
                stopping = True
                self.folder.request_stop(f"the launcher received {interrupts.first}")
                keeps = self.plan.experiment.checkpoint.mode != "off"
                first = "saves its state first" if keeps else "stops after this step, and saves nothing"
                self.console.echo(f"Stopping: the run {first}. Press Ctrl-C again to end at once.")
            if interrupts.again:
                self.ranks.kill()
                self._show()
                reason = f"killed at the second signal, after {interrupts.first}"
                return AttemptResult("preempted", INTERRUPTED, reason)
            self._show()
            time.sleep(POLL_INTERVAL)
        self._show()
        result = self.ranks.result()
        loss = self.folder_watch.confirmed_loss() if result.state == "failed" else None
        return result if loss is None else AttemptResult("failed", FAILED, loss)

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


def _report(plan: RunPlan, summary: Summary, result: AttemptResult, console: RunConsole) -> None:
    if result.state == "failed":
        # A UserError and an Outcome explain themselves; other failures show their traceback.
        first = result.detail.strip().partition("\n")[0]
        explained = result.exit_code == UserError.exit_code or (first and (result.reason or "").endswith(f": {first}"))
        text = result.detail if explained else f"{result.detail}\n{result.reason}"
        console.error(text.strip())
    if plan.folder.path.exists():
        console.echo(f"{describe(summary, plan.experiment.training.last_step)}: {plan.folder.path}")
    if result.state == "preempted":
        keeps = plan.experiment.checkpoint.mode != "off"
        begins = "continue it" if keeps else "begin it again, as it saves nothing (checkpoint.mode=off)"
        console.echo(f"Type the same command to {begins}.")


def main(arguments: Sequence[str]) -> int:
    """Launch a run folder's ranks for the sweep that is the parent, and wait; returns the run's exit code."""
    sweep = os.getppid()
    folder, *rest = arguments or [""]
    if not folder or rest not in ([], [PREDICTION_FLAG]):
        print(f"usage: python -m titan_exp.launch.local.executor RUN_FOLDER [{PREDICTION_FLAG}]", file=sys.stderr)
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
