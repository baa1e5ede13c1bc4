"""Concurrent runs on one CPU machine, each with its own launcher process and cores."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.local.relaunch import PREDICTION_FLAG
from titan_exp.launch.run_plan import RunPlan, create_run_folder
from titan_exp.launch.signals import Interrupts

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
    """Runs up to `jobs` plans at a time, with the cores split among them.

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
                        echo("Stopping: every run saves first. Ctrl-C again ends them at once.")
                        self._signal()
                    time.sleep(POLL_INTERVAL)
        finally:
            for slot in self._running():  # only after an exception
                assert slot.process is not None
                slot.process.terminate()

    def _running(self) -> list[_Slot]:
        return [slot for slot in self._slots if slot.process is not None]

    def _start(self, slot: _Slot, plan: RunPlan) -> None:
        try:
            create_run_folder(plan)
            plan.folder.logs.mkdir(exist_ok=True)
            with (plan.folder.logs / LOG).open("ab") as log, tempfile.TemporaryFile() as prediction:
                command = [sys.executable, "-m", "titan_exp.launch.local.relaunch", str(plan.folder.path)]
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
