"""The process of one rank, around the trainer: its record, its signals, and its watch over the launcher.

`run_rank(path)` is what the launcher submits. `python -m titan_exp.launch.rank.main RUN_FOLDER`, alone or under
torchrun, does the same without a launcher.
"""

import contextlib
import importlib
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType

import psutil

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.schema.typed_config import load_experiment
from titan_exp.launch.health.hang_report import HangFiles
from titan_exp.launch.health.watchdog import Watchdog
from titan_exp.launch.rank.parent_watchdog import ParentWatchdog
from titan_exp.launch.rank.rank_env import RankInfo, srun_rank, submitit_rank, torchrun_rank
from titan_exp.launch.rank.rank_status import FALLBACK_FOLDER, RankError, RankRecord, read_record, write_record
from titan_exp.launch.slurm.rendezvous import slurm_task
from titan_exp.launch.state.close_attempt import close_attempt
from titan_exp.tracking.progress_tracker import PROGRESS
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.tracking.run_folder.state import DONE, FAILED, HUNG, STOPPED, StateName

RANK_MAIN = "TITAN_EXP_RANK_MAIN"
"""Environment variable: dotted name of what a rank runs; the trainer unless set."""
TRAINER = "titan_exp.trainer.rank_main.main"
FAILURE_MARK = "titan_exp: this rank failed"
"""The line in a rank's log before its traceback, where the launcher, who shows it too, stops showing the log."""
STATES: dict[int, StateName] = {DONE: "done", STOPPED: "preempted"}


def run_rank(path: str) -> None:
    """Run one rank of the run folder at `path`, started by the launcher through submitit.

    Raises:
        SystemExit: with the rank's exit code, unless it is 0.
    """
    code = _Rank(RunFolder(path), submitit_rank()).run()
    if code:
        sys.exit(code)


def main(arguments: Sequence[str]) -> int:
    """Run one rank without a launcher: as the environment variables of srun or torchrun say, or as the only process.

    Returns the rank's exit code; under srun, 0 also where it saved and stopped.
    """
    if len(arguments) != 1:
        print("usage: python -m titan_exp.launch.rank.main RUN_FOLDER", file=sys.stderr)
        return UserError.exit_code
    folder, task = RunFolder(arguments[0]), slurm_task()
    try:
        state = folder.read_state()
        if state is not None and state.state == "done":
            if task is None or task.rank == 0:
                print(f"{folder.path}: done already, after step {state.step}")
            return DONE
        rank_info = torchrun_rank(folder) if task is None else srun_rank(folder, task)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    code = _Rank(folder, rank_info).run()
    # srun would kill the peers of the first rank that has saved, in the middle of their last words.
    return DONE if rank_info.gang and code == STOPPED else code


class _Rank:
    """One rank of one attempt, from its record's first line to its last."""

    def __init__(self, folder: RunFolder, rank_info: RankInfo) -> None:
        self.folder, self.rank_info = folder, rank_info
        self.record = RankRecord(rank_info.rank, os.getpid(), socket.gethostname(), time.time())
        self.watch: ParentWatchdog | None = None

    def run(self) -> int:
        """Run the trainer; returns the exit code. The folder stays held until this process is gone."""
        self.folder.join(self.rank_info.rank)
        if self.folder.read_attempts()[-1].attempt != self.rank_info.attempt:
            print("Another start of this run came first; this rank ends.", file=sys.stderr)
            return STOPPED
        self.rank_info.announce()
        self._write(self.record)
        self._handle_signals()
        self._start_watch()
        watchdog = self._start_hang_watch()
        code, error = _call(_rank_main, str(self.folder.path))
        watchdog.stop()
        self._end(code, error)
        if error is not None:
            print(FAILURE_MARK, error.message if error.user else error.traceback, sep="\n", file=sys.stderr, flush=True)
        return code

    def _end(self, code: int, error: RankError | None) -> None:
        self._write(replace(self.record, end=time.time(), exit=code, error=error))
        alone = self.watch is None or self.watch.orphaned
        if self.rank_info.rank == 0 or (alone and code not in (DONE, STOPPED)):
            reason = self.folder.stop_reason() if code == STOPPED else None
            if error is not None:
                reason = error.message if code == HUNG else f"rank {self.rank_info.rank}: {error.type}: {error.message}"
            with contextlib.suppress(OSError):  # a full disk: the launcher, or the next start, sees a dead run
                state = STATES.get(code, "failed")
                close_attempt(self.folder, self.rank_info.attempt, state, exit_code=code, reason=reason, overrule=False)

        if self.watch is not None and self.watch.orphaned:
            self._tidy_up()

    def _tidy_up(self) -> None:
        """Remove the ranks' meeting place, which the launcher would have done; the last rank to end does it."""
        rendezvous_folder = os.environ.get(FALLBACK_FOLDER)
        records = [read_record(self.folder, self.rank_info.attempt, rank) for rank in range(self.rank_info.world_size)]
        if rendezvous_folder is not None and all(record is None or record.end is not None for record in records):
            shutil.rmtree(rendezvous_folder, ignore_errors=True)

    def _write(self, record: RankRecord) -> None:
        try:
            write_record(self.folder, self.rank_info.attempt, record)
        except OSError as error:
            print(f"the record of rank {record.rank} cannot be written: {error}", file=sys.stderr)

    def _handle_signals(self) -> None:
        """A polite request to end saves first. Ctrl-C and a closed terminal are the launcher's business, if there is
        one; without it the first Ctrl-C saves and the second ends at once."""
        launched = self.rank_info.launcher is not None
        signal.signal(signal.SIGINT, signal.SIG_IGN if launched else self._interrupt)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if launched else self._request_stop)
        signal.signal(signal.SIGTERM, self._request_stop)
        signal.signal(signal.SIGUSR2, self._request_stop)
        signal.signal(signal.SIGCONT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGHUP})

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self._request_stop(number, frame)

    def _request_stop(self, number: int, _: FrameType | None) -> None:
        with contextlib.suppress(OSError):  # on a full disk there is nothing to save to
            self.folder.request_stop(f"rank {self.rank_info.rank} received {signal.Signals(number).name}")

    def _start_watch(self) -> None:
        if self.rank_info.launcher is None or self.rank_info.controller is None:
            return
        self.watch = ParentWatchdog(
            self.folder,
            attempt=self.rank_info.attempt,
            rank=self.rank_info.rank,
            world_size=self.rank_info.world_size,
            launcher=self.rank_info.launcher,
            controller=self.rank_info.controller,
            give_up=self._give_up,
        )
        self.watch.start()

    def _start_hang_watch(self) -> Watchdog:
        watch = Watchdog(
            load_experiment(self.folder.config).cluster,
            HangFiles(self.folder.attempt_logs(self.rank_info.attempt), self.rank_info.world_size),
            rank=self.rank_info.rank,
            progress=PROGRESS,
            give_up=lambda reason: self._give_up(reason, HUNG, "Hung"),
        )
        watch.start()
        return watch

    def _give_up(self, reason: str, code: int = FAILED, kind: str = "GivenUp") -> None:
        """End at once, from a watch's thread, whatever the main thread hangs in."""
        self._end(code, RankError(kind, reason, "", user=False))
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        os._exit(code)


def _rank_main(path: str) -> None:
    module, _, name = os.environ.get(RANK_MAIN, TRAINER).rpartition(".")
    getattr(importlib.import_module(module), name)(path)


def _call(function: Callable[[str], None], path: str) -> tuple[int, RankError | None]:
    """Exit code of `function(path)`, and what it raised."""
    try:
        function(path)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            code = error.code or DONE
            ended = RankError("SystemExit", f"exit code {code}", traceback.format_exc(), user=False)
            return code, None if code in (DONE, STOPPED) else ended
        return FAILED, RankError("SystemExit", str(error.code), traceback.format_exc(), user=False)
    except UserError as error:
        return error.exit_code, RankError("UserError", str(error), traceback.format_exc(), user=True)
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next  # this file's own frames say nothing about the error
        text = "".join(traceback.format_exception(type(error), error, frames))
        return FAILED, RankError(type(error).__name__, str(error), text, user=False)
    return DONE, None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
