"""Local executor: ranks as child processes; runs are sequential, or concurrent on separate cores."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.executor import Executor, Submission, SubmitOptions
from titan_exp.launch.local.ranks import submitit_rank
from titan_exp.launch.local.run import INTERRUPTED, PREDICTION_FLAG, run
from titan_exp.launch.rank.rank_env import ATTEMPT, RankInfo
from titan_exp.launch.run_console import Interrupts, RunConsole, describe, summarize
from titan_exp.launch.run_plan import RunPlan, create_run_folder
from titan_exp.tracking.run_folder.run_folder import STOPPED, RunFolder

POLL_INTERVAL = 0.1
"""Seconds between polls of the launcher processes."""
LOG = "launcher.log"
"""Log file of the launcher process, in the run's log folder."""


@dataclass
class _Slot:
    """Cores for one run at a time."""

    cores: set[int]
    plan: RunPlan | None = None
    process: "subprocess.Popen[bytes] | None" = None


class ConcurrentRuns:
    """Runs up to `jobs` plans at a time and splits the cores among them.

    `on_end` receives the launcher's exit code, and the reason if it failed to start. No run starts once
    `stop_requested` returns True.
    """

    def __init__(
        self,
        jobs: int,
        *,
        on_start: Callable[[RunPlan], None],
        on_end: Callable[[RunPlan, int, str | None], None],
        stop_requested: Callable[[], bool],
    ) -> None:
        self._on_start, self._on_end, self._stop_requested = on_start, on_end, stop_requested
        self._slots = [_Slot(cores) for cores in _split_cores(jobs)]
        self._interrupts = Interrupts()

    def run(self, plans: Sequence[RunPlan], echo: Callable[[str], None]) -> None:
        """Run all plans; none starts after a signal or a stop request."""
        waiting, forwarded = list(plans), 0
        try:
            with self._interrupts:
                while True:
                    self._collect()
                    stop = self._interrupts.first is not None or self._stop_requested()
                    for slot in self._slots:
                        if slot.process is None and waiting and not stop:
                            self._start(slot, waiting.pop(0))
                    if not self._running() and (stop or not waiting):
                        return
                    signals = (self._interrupts.first is not None) + self._interrupts.again
                    if signals > forwarded:
                        forwarded = signals
                        saved = any(plan.experiment.checkpoint.mode != "off" for plan in plans)
                        first = "saves its state first" if saved else "stops after its step, and saves nothing"
                        echo(f"Stopping: every run {first}. Press Ctrl-C again to end them at once.")
                        self._signal()
                    time.sleep(POLL_INTERVAL)
        finally:
            for slot in self._running():  # reached only after an exception
                assert slot.process is not None
                slot.process.terminate()

    def _running(self) -> list[_Slot]:
        return [slot for slot in self._slots if slot.process is not None]

    def _start(self, slot: _Slot, plan: RunPlan) -> None:
        try:
            create_run_folder(plan)
            plan.folder.logs.mkdir(exist_ok=True)
            with (plan.folder.logs / LOG).open("ab") as log, tempfile.TemporaryFile() as prediction:
                command = [sys.executable, "-m", "titan_exp.launch.local.run", str(plan.folder.path)]
                if plan.prediction is not None:
                    # Only the holder of the run lock, the launcher process, may write into an existing folder.
                    command.append(PREDICTION_FLAG)
                    prediction.write(plan.prediction.encode())
                    prediction.seek(0)
                slot.process = subprocess.Popen(command, stdin=prediction, stdout=log, stderr=log, process_group=0)
        except (UserError, OSError) as error:
            self._on_end(plan, UserError.exit_code, str(error))
            return
        slot.plan = plan
        if slot.cores:
            os.sched_setaffinity(slot.process.pid, slot.cores)  # before its imports; ranks inherit it
        self._on_start(plan)

    def _collect(self) -> None:
        for slot in self._running():
            assert slot.process is not None
            assert slot.plan is not None
            code = slot.process.poll()
            if code is not None:
                plan, slot.process, slot.plan = slot.plan, None, None
                self._on_end(plan, code, None)

    def _signal(self) -> None:
        """Forward the signal: launchers have their own process groups and receive none from the terminal."""
        for slot in self._running():
            assert slot.process is not None
            slot.process.send_signal(signal.SIGINT)


def _split_cores(jobs: int) -> list[set[int]]:
    """Cores per slot; empty sets without CPU affinity, or with fewer cores than slots."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < jobs:
        return [set() for _ in range(jobs)]
    return [set(cores[slot::jobs]) for slot in range(jobs)]


class LocalExecutor(Executor):
    """Runs on this machine and waits for each run. Ranks rendezvous through a file."""

    waits = True

    def submit(self, plans: Sequence[RunPlan], options: SubmitOptions) -> list[Submission]:
        """Run every plan to its end, even if others fail; none starts after Ctrl-C or a stop request."""
        results = {number: _existing(plan) for number, plan in enumerate(plans)}
        for number, plan in enumerate(plans):
            submission = results[number]
            if submission is not None:
                text = "already done" if submission.outcome == "done" else submission.reason
                options.echo(f"[{number + 1}/{len(plans)}] {options.title(plan)}: {text}")
        waiting = [number for number, submission in results.items() if submission is None]
        run_all = _run_sequentially if options.jobs == 1 or len(waiting) < 2 else _run_concurrently
        results |= run_all(plans, waiting, options)
        code = STOPPED if options.stop_requested() else INTERRUPTED
        return [results[number] or Submission(plan, "not started", exit_code=code) for number, plan in enumerate(plans)]

    def launch(self, plan: RunPlan) -> Submission:
        """Run one plan with a progress display."""
        outcome = run(plan)
        return _submission(plan, outcome.summary.state, outcome.exit_code)

    def rank_info(self) -> RankInfo | None:
        """Rank started by submitit's local controller; None under another launcher."""
        return submitit_rank() if ATTEMPT in os.environ else None


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
            results[number] = Submission(plan, "refused", reason=str(error), exit_code=error.exit_code)
            continue
        except KeyboardInterrupt:
            break
        results[number] = _submission(plan, outcome.summary.state, outcome.exit_code)
        if outcome.exit_code == INTERRUPTED:
            break
    return results


def _run_concurrently(
    plans: Sequence[RunPlan], waiting: Sequence[int], options: SubmitOptions
) -> dict[int, Submission | None]:
    numbers = {plans[number].folder.path: number for number in waiting}
    results: dict[int, Submission | None] = {}
    attempts: dict[int, int] = {}

    def heading(plan: RunPlan) -> str:
        return f"[{numbers[plan.folder.path] + 1}/{len(plans)}] {options.title(plan)}"

    def on_start(plan: RunPlan) -> None:
        attempts[numbers[plan.folder.path]] = len(plan.folder.read_attempts())
        options.echo(f"{heading(plan)}: started in {plan.folder.path}")

    def on_end(plan: RunPlan, code: int, refusal: str | None) -> None:
        summary = summarize(plan.folder)
        submission = _submission(plan, summary.state, code)
        said = refusal or describe(summary, plan.experiment.training.last_step)
        if refusal:
            submission = Submission(plan, "refused", reason=refusal, exit_code=code)
        elif code == -signal.SIGINT and len(plan.folder.read_attempts()) == attempts[numbers[plan.folder.path]]:
            # It came while the launcher was still importing.
            submission, said = Submission(plan, "not started", exit_code=INTERRUPTED), "stopped before it started"
        options.echo(f"{heading(plan)}: {said}")
        if submission.outcome == "failed":
            options.echo(f"    {submission.reason or f'exit code {code}'}\n    titan-exp logs {plan.folder.path}")
        results[numbers[plan.folder.path]] = submission

    runs = ConcurrentRuns(options.jobs, on_start=on_start, on_end=on_end, stop_requested=options.stop_requested)
    runs.run([plans[number] for number in waiting], options.echo)
    return results


def _existing(plan: RunPlan) -> Submission | None:
    """Result of a run that is already done or running; None if it must be started."""
    if not plan.folder.path.exists():
        return None
    state = plan.folder.read_state()
    if state is not None and state.state == "done":
        return Submission(plan, "done")
    holder = plan.folder.holder()
    return None if holder is None else Submission(plan, "running", reason=f"already running ({holder}), left alone")


def _submission(plan: RunPlan, state: str, code: int) -> Submission:
    outcome = state if state in ("done", "preempted") else "failed"
    return Submission(plan, outcome, reason=_reason(plan.folder), exit_code=code)


def _reason(folder: RunFolder) -> str | None:
    state = folder.read_state()
    return None if state is None or state.state == "done" else state.reason
