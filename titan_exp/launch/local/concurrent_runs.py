"""Several runs at a time on one CPU machine: each has a launching process and cores of its own."""

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
"""Seconds between looks at the processes."""
LOG = "launcher.log"
"""In the run's folder of logs: what its launching process shows."""


@dataclass
class _Slot:
    """A place for one run."""

    cores: set[int]
    plan: RunPlan | None = None
    process: "subprocess.Popen[bytes] | None" = None


class ConcurrentRuns:
    """Runs plans, at most `jobs` at a time.

    Args:
        jobs: how many; cores are divided among them.
        begun: called when a run's process was started.
        ended: called with its exit code when it is gone, and why where it could not be started.
        stopped: asked before each start: whether nothing more shall be started.
    """

    def __init__(
        self,
        jobs: int,
        *,
        begun: Callable[[RunPlan], None],
        ended: Callable[[RunPlan, int, str | None], None],
        stopped: Callable[[], bool],
    ) -> None:
        self._begun, self._ended, self._stopped = begun, ended, stopped
        self._slots = [_Slot(cores) for cores in _split_cores(jobs)]
        self._interrupts = Interrupts()

    def run(self, plans: Sequence[RunPlan], say: Callable[[str], None]) -> bool:
        """Run all of them; returns whether the rest was left alone because of a signal or on request."""
        waiting, told = list(plans), 0
        try:
            with self._interrupts:
                while True:
                    self._collect()
                    stop = self._interrupts.first is not None or self._stopped()
                    for slot in self._slots:
                        if slot.process is None and waiting and not stop:
                            self._start(slot, waiting.pop(0))
                    if not self._running() and (stop or not waiting):
                        return bool(waiting)
                    signals = (self._interrupts.first is not None) + self._interrupts.again
                    if signals > told:
                        told = signals
                        say("Stopping: every run saves first. Ctrl-C again ends them at once.")
                        self._signal()
                    time.sleep(POLL_INTERVAL)
        finally:
            for slot in self._running():  # only after an error of our own: no run goes on unseen
                assert slot.process is not None
                slot.process.terminate()

    def _running(self) -> list[_Slot]:
        return [slot for slot in self._slots if slot.process is not None]

    def _start(self, slot: _Slot, plan: RunPlan) -> None:
        try:
            create_run_folder(plan)
            plan.folder.logs.mkdir(exist_ok=True)
            with (plan.folder.logs / LOG).open("ab") as log, tempfile.TemporaryFile() as told:
                command = [sys.executable, "-m", "titan_exp.launch.local.relaunch", str(plan.folder.path)]
                if plan.prediction is not None:
                    # Only who holds a folder that is there already may write into it, and that is the process.
                    command.append(PREDICTION_FLAG)
                    told.write(plan.prediction.encode())
                    told.seek(0)
                slot.process = subprocess.Popen(command, stdin=told, stdout=log, stderr=log, process_group=0)
        except (UserError, OSError) as error:
            self._ended(plan, UserError.exit_code, str(error))
            return
        slot.plan = plan
        if slot.cores:
            os.sched_setaffinity(slot.process.pid, slot.cores)  # before it has imported anything; its ranks inherit it
        self._begun(plan)

    def _collect(self) -> None:
        for slot in self._running():
            assert slot.process is not None
            assert slot.plan is not None
            code = slot.process.poll()
            if code is not None:
                plan, slot.process, slot.plan = slot.plan, None, None
                self._ended(plan, code, None)

    def _signal(self) -> None:
        """Hand the signal on: in process groups of their own, the runs do not get it from the terminal as well."""
        for slot in self._running():
            assert slot.process is not None
            slot.process.send_signal(signal.SIGINT)


def _split_cores(jobs: int) -> list[set[int]]:
    """Cores of each of the places; empty sets where the system cannot bind, or has fewer cores than places."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < jobs:
        return [set() for _ in range(jobs)]
    return [set(cores[place::jobs]) for place in range(jobs)]
