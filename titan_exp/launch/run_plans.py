"""One run from its configuration to its end: found or made, refused or started, followed, and closed.

The same command finds the same folder, says that the run is done, or continues it.
"""

import socket
import time
from dataclasses import dataclass, replace

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.launch.local.ranks import LocalRanks
from titan_exp.launch.run_console import RunConsole
from titan_exp.launch.run_plan import Plan, commit, refresh, writable
from titan_exp.launch.signals import Interrupts
from titan_exp.launch.state.close_attempt import close_attempt, close_dead_attempts
from titan_exp.launch.state.exit_status import AttemptResult
from titan_exp.launch.state.run_lock import await_orphans, hold
from titan_exp.launch.state.tail import Follower, rows
from titan_exp.launch.summary import Summary, describe, summarize
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState

EVERY = 0.1
"""Seconds between looks at the ranks and their files."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


@dataclass(frozen=True)
class Outcome:
    """How a call of `run` ended."""

    folder: RunFolder
    """Of the run."""
    exit_code: int
    """0 done, 130 stopped by a signal to the launcher, 85 stopped otherwise, 2 or 1 failed."""
    summary: Summary
    """What the run's files say now."""


def run(plan: Plan, *, screen: RunConsole | None = None) -> Outcome:
    """Run a plan and wait for its end; a run that is done is only reported.

    Raises:
        UserError: the folder cannot be written, or the run goes on elsewhere.
    """
    screen = screen or RunConsole()
    commit(plan)
    with writable(plan.folder.path), hold(plan.folder, "launcher", screen.say):
        state = plan.folder.read_state()
        if state is not None and state.state == "done":
            summary = summarize(plan.folder)
            screen.say(f"{describe(summary, plan.experiment.training.steps)}: {plan.folder.path}")
            screen.say(
                "This run is done, so nothing was started. To run it again, give another experiment.seed or "
                "experiment.name, or remove its folder."
            )
            return Outcome(plan.folder, 0, summary)
        execution = _Execution(plan, _open_attempt(plan, state, screen), screen)
        verdict = execution.run()
    summary = replace(summarize(plan.folder), state=verdict.state)
    _report(plan, summary, verdict, screen)
    stopped_by_signal = verdict.state == "preempted" and execution.interrupts.first is not None
    return Outcome(plan.folder, INTERRUPTED if stopped_by_signal else verdict.exit_code, summary)


def _open_attempt(plan: Plan, state: RunState | None, screen: RunConsole) -> int:
    """Write down the intent to start; returns the number of the attempt."""
    folder, size = plan.folder, ResolvedLayout.of(plan.experiment).world_size
    last = state.attempt if state else 0
    close_dead_attempts(folder)
    refresh(plan, last)
    attempt = folder.add_attempt(world_size=size, hosts=[socket.gethostname()]).attempt
    # A rank of the attempt before that was only just starting either sees this row and ends, or is seen here.
    await_orphans(folder, screen.say)
    folder.clear_stop()
    folder.write_state(RunState("running", state.step if state else 0, time.time(), attempt, None))
    processes = "1 process" if size == 1 else f"{size} processes"
    if last and state is not None:
        before = state.reason or ("died without a word" if state.state in ("running", "pending") else state.state)
        screen.say(f"{folder.path}: attempt {attempt}, {processes}, after attempt {last} ({before})")
    else:
        screen.say(f"{folder.path}: {processes}")
    return attempt


class _Execution:
    """One attempt while it runs."""

    def __init__(self, plan: Plan, attempt: int, screen: RunConsole) -> None:
        self.plan, self.folder, self.attempt, self.screen = plan, plan.folder, attempt, screen
        self.ranks = LocalRanks(plan.experiment, plan.folder, attempt)
        self.metrics = Follower(plan.folder.metrics, from_now=True)
        self.log = Follower(self.ranks.log(0))
        self.interrupts = Interrupts()

    def run(self) -> AttemptResult:
        """Start, follow and close the attempt."""
        verdict = AttemptResult("failed", 1, "the launcher failed")
        try:
            with self.interrupts:
                self.ranks.start()
                self.folder.update_attempt(self.attempt, job_id=self.ranks.job_id, start=time.time())
                self.screen.open(self._title(), self.plan.experiment.training.steps)
                verdict = self._follow()
        finally:
            self.ranks.close()
            self.screen.close(verdict.state)
            self._write_down(verdict)
        return verdict

    def _write_down(self, verdict: AttemptResult) -> None:
        state, code, reason = verdict.state, verdict.exit_code, verdict.reason
        try:
            close_attempt(self.folder, self.attempt, state, exit_code=code, reason=reason, overrule=True)
        except OSError as error:
            # The verdict matters more than the file; the next start finds a run that nobody holds.
            self.screen.complain(f"{self.folder.state} cannot be written ({error.strerror}).")

    def _follow(self) -> AttemptResult:
        told, interrupts = False, self.interrupts
        while not self.ranks.poll():
            if interrupts.first and not told:
                told = True
                self.folder.request_stop(f"the launcher received {interrupts.first}")
                self.screen.say("Stopping: saving first. Ctrl-C again ends at once.")
            if interrupts.again:
                self.ranks.kill()
                self._show()
                return AttemptResult("preempted", INTERRUPTED, f"killed at the second signal, after {interrupts.first}")
            self._show()
            time.sleep(EVERY)
        self._show()
        return self.ranks.verdict()

    def _show(self) -> None:
        self.screen.log_lines(self.log.lines())
        for row in rows(self.metrics.lines(), self.attempt):
            self.screen.row(row)

    def _title(self) -> str:
        return f"{self.plan.experiment.experiment.name}/{self.plan.run_id}"


def _report(plan: Plan, summary: Summary, verdict: AttemptResult, screen: RunConsole) -> None:
    if verdict.state == "failed":
        # What a user can put right says so itself; anything else is shown where it happened.
        text = verdict.detail if verdict.exit_code == UserError.exit_code else f"{verdict.detail}\n{verdict.reason}"
        screen.complain(text.strip())
    screen.say(f"{describe(summary, plan.experiment.training.steps)}: {plan.folder.path}")
    if verdict.state == "preempted":
        screen.say("The same command continues it.")
