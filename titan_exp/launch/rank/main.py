"""Rank process around the trainer: status record, signals, watchdogs.

`python -m titan_exp.launch.rank.main RUN_FOLDER` runs it under an executor, srun, torchrun, or alone.
"""

import contextlib
import importlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil

from titan_exp.config.command_line.output import safe_output
from titan_exp.config.devices import allocator_environment, return_freed_memory
from titan_exp.config.errors.user_error import Outcome, UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.foreign_code import executor_names
from titan_exp.launch.attempt_end import AttemptResult, close_attempt
from titan_exp.launch.executor import Executor, executor_for
from titan_exp.launch.provenance import attempt_changes, edited_code
from titan_exp.launch.rank import rank_env
from titan_exp.launch.rank.host_agent import join_attempt
from titan_exp.launch.watchdog import HangFiles, Watchdog
from titan_exp.tracking.display import format_items
from titan_exp.tracking.logging import PROGRESS
from titan_exp.tracking.run_folder import files
from titan_exp.tracking.run_folder.folder_owner import FolderWatch
from titan_exp.tracking.run_folder.run import Run
from titan_exp.tracking.run_folder.run_folder import DONE, ENDED_STATES, FAILED, HUNG, STOPPED, RunFolder, World

RANK_MAIN = "TITAN_EXP_RANK_MAIN"
"""Environment variable: import path of the rank's main function, which takes a `Run`; by default the trainer's."""
TRAINER = "titan_exp.trainer.rank_main.main"
MAPPED_BYTES = 2**22  # allocation size from which a rank's freed host memory returns to the system


def run_rank(run: Run, rank: rank_env.RankInfo) -> int:
    """Run one rank that has joined its attempt. Returns its exit code; 0 for a saved stop, as srun would kill peers."""
    return_freed_memory(MAPPED_BYTES)
    safe_output("utf-8", raw=True)  # a log is UTF-8 in any locale
    code = _Rank(run, rank).run()
    return DONE if rank.gang and code == STOPPED else code


def main(arguments: Sequence[str]) -> int:
    """Run one rank of a run folder under its executor, srun, torchrun or alone; returns the exit code."""
    if len(arguments) != 1:
        print("usage: python -m titan_exp.launch.rank.main RUN_FOLDER", file=sys.stderr)
        return UserError.exit_code
    safe_output("utf-8", raw=True)
    run = Run(arguments[0])
    folder = run.folder
    rank_env.extend_import_path()
    try:
        if not folder.config.exists():
            raise UserError(f"{folder.path} has no config.yaml, so it is not a run. Create one with titan-exp train.")
        executor, rank = _find_rank(run.experiment)
        state = folder.read_state()
        if state is not None and state.state == "done":
            if rank.rank == 0:
                print(f"{folder.path}: already done, after step {state.step}")
            return DONE
        expected = ResolvedLayout.of(run.experiment).world_size
        if rank.world_size != expected:
            needs = f"{folder.path} needs {format_items(expected, 'process')}, and you started {rank.world_size}"
            command = f"{rank.by_hand.format(expected)} -m titan_exp.launch.rank.main {folder.path}"
            raise UserError(f"{needs}. Start it with `{command}`.")
        joined = None if executor is None else executor.join_world(folder, rank)
        run.folder, rank = joined or (folder, join_attempt(folder, rank, executor))
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return run_rank(run, rank)


def _find_rank(experiment: Experiment) -> tuple[Executor | None, rank_env.RankInfo]:
    """Executor that started this process, the configured one being tried first, or None for torchrun, and its rank."""
    kinds = dict.fromkeys([experiment.cluster.kind, *executor_names()])
    for executor in map(executor_for, kinds):
        rank = executor.rank_info()
        if rank is not None:
            return executor, replace(rank, token=rank.token or os.environ.get(rank_env.TOKEN))
    return None, rank_env.torchrun_rank()


class _Rank:
    def __init__(self, source: Run, rank: rank_env.RankInfo) -> None:
        assert rank.attempt is not None
        self.source, self.folder, self.rank, self.attempt = source, source.folder, rank, rank.attempt
        self.record = rank_env.RankRecord(rank.rank, os.getpid(), socket.gethostname(), time.time())
        self.parent_watchdog: rank_env.ParentWatchdog | None = None
        self._record_lock = threading.Lock()
        self.folder_watch = FolderWatch(source.folder.path)
        self._is_of_several = World.from_environment() is not None
        self._has_own_job = self._is_of_several and rank.launcher is None

    def run(self) -> int:
        """Run the trainer; returns the exit code. The rank's lock is held until this process exits."""
        self.folder.join(self.rank.rank)
        if self.folder.read_attempts()[-1].attempt != self.attempt:
            print("A newer attempt of this run exists, so this rank exits.", file=sys.stderr)
            return STOPPED
        self.rank.set_torch_env()
        experiment = self.source.experiment
        os.environ.update(allocator_environment(experiment.cluster, experiment.compile, os.environ))
        self._record()
        self._handle_signals()
        if self.rank.launcher is not None and self.rank.controller is not None:
            self.parent_watchdog = rank_env.ParentWatchdog(self.folder, self.rank, self._give_up, self._leave_if_new)
            self.parent_watchdog.start()
        self._print_changes()
        watchdog = Watchdog(
            experiment.cluster,
            HangFiles(self.folder.attempt_logs(self.attempt), self.rank.world_size),
            rank=self.rank.rank,
            progress=PROGRESS,
            give_up=lambda reason: self._give_up(reason, HUNG, rank_env.HANG),
            on_poll=lambda: self._give_up_if_lost(self.folder_watch.loss()),
        )
        watchdog.start()
        with _temporary_files():
            code, error = _call(self.source)
        if error is not None:
            self._give_up_if_lost(self.folder_watch.confirmed_loss())  # the cause of any error
        watchdog.stop()
        self._end(code, error)
        if error is not None:
            text = error.message if error.user else error.traceback
            print(rank_env.FAILURE_MARK, text, sep="\n", file=sys.stderr, flush=True)
        return code

    def _print_changes(self) -> None:
        """Print code changes since the last attempt or the parent run, and since the launch, in the log of rank 0."""
        if self.rank.rank != 0:
            return
        # A damaged or unreadable record does not stop a run.
        with contextlib.suppress(UserError, OSError, LookupError, TypeError, AttributeError):
            since, lines = attempt_changes(self.source, self.attempt)
            if lines:
                print(f"Code changed since {since}:", *lines, sep="\n  ", flush=True)
            if edited := edited_code(self.folder):
                heading = "You have edited code after the launch, which recorded the code before:"
                print(heading, *edited, sep="\n  ", flush=True)

    def _end(self, code: int, error: rank_env.RankError | None) -> None:
        self._record(end=time.time(), exit=code, error=error)
        orphaned = self.parent_watchdog is not None and self.parent_watchdog.orphaned
        alone = self.parent_watchdog is None or orphaned
        # A world's end is not the run's end, unless no launcher is left to record it.
        closes = orphaned or not self._is_of_several
        if closes and self._has_folder() and (self.rank.rank == 0 or (alone and code not in (DONE, STOPPED))):
            reason = self.folder.stop_reason() if code == STOPPED else None
            if error is not None:
                reason = error.reason(self.rank.rank)
            with contextlib.suppress(OSError):  # on a full disk, the launcher or the next start closes the attempt
                result = AttemptResult(ENDED_STATES.get(code, "failed"), code, reason)
                close_attempt(self.folder, self.attempt, result, overrule=False)
        if self.parent_watchdog is not None and self.parent_watchdog.orphaned:  # also if it has exited meanwhile
            self._remove_rendezvous_folder()

    def _remove_rendezvous_folder(self) -> None:
        rendezvous_folder = os.environ.get(rank_env.FALLBACK_FOLDER)
        records = [rank_env.read_record(self.folder, self.attempt, rank) for rank in range(self.rank.world_size)]
        if rendezvous_folder is not None and all(record is None or record.end is not None for record in records):
            shutil.rmtree(rendezvous_folder, ignore_errors=True)

    def _has_folder(self) -> bool:
        """False if the run folder was deleted, in which case another run may have begun at its path."""
        return self.folder_watch.holds(self.folder.path)

    def _record(self, **fields: Any) -> None:
        with self._record_lock:
            self.record = replace(self.record, **fields)
            if not self._has_folder():
                return
            try:
                rank_env.write_record(self.folder, self.attempt, self.record)
            except OSError as error:
                print(f"cannot write the status of rank {self.rank.rank}: {error}", file=sys.stderr)

    def _handle_signals(self) -> None:
        """SIGTERM and SIGUSR2 save and stop. So do SIGINT and SIGHUP without a launcher, which otherwise handles them;
        a second SIGINT kills."""
        launched = self.rank.launcher is not None
        signal.signal(signal.SIGINT, signal.SIG_IGN if launched else self._interrupt)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if launched else self._request_stop)
        signal.signal(signal.SIGTERM, self._request_stop)
        signal.signal(signal.SIGUSR2, self._request_stop)
        # Python's C handler writes the number of each signal into this socket as it arrives.
        receiving, sending = socket.socketpair()
        sending.setblocking(False)
        signal.set_wakeup_fd(sending.detach(), warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a worker's signals are not the rank's
        threading.Thread(target=self._record_signal, args=(receiving,), daemon=True).start()
        signal.signal(signal.SIGCONT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGHUP})

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self._request_stop(number, frame)

    def _request_stop(self, number: int, _: FrameType | None) -> None:
        if self._has_own_job:
            return  # the thread of `_record_signal` ends this rank
        with contextlib.suppress(OSError):  # a full disk
            if self._has_folder():
                self.folder.request_stop(f"rank {self.rank.rank} received {signal.Signals(number).name}")

    def _record_signal(self, pipe: socket.socket) -> None:
        """Record the first stop signal, even while the main thread waits in a collective."""
        numbers = {signal.SIGTERM, signal.SIGUSR2}
        while not (found := numbers.intersection(pipe.recv(1))):
            pass
        number = found.pop()
        if self._has_own_job:
            # Its peers are gone, or its job must end. The other worlds train on, and there is nothing to save.
            self._record(signal=signal.Signals(number).name)
            _kill_self(128 + number)
        else:
            self._request_stop(number, None)
            self._record(signal=signal.Signals(number).name)

    def _leave_if_new(self) -> None:
        """Exit as a rank of one of several worlds that has finished no step: it has nothing to save, and would wait for
        the state of the other worlds, which have stopped."""
        if self._is_of_several and not PROGRESS.has_stepped:
            self._record(end=time.time(), exit=STOPPED)
            self._remove_rendezvous_folder()
            _kill_self(STOPPED)

    def _give_up_if_lost(self, loss: str | None) -> None:
        """Exit if the run folder was deleted or moved; only in a moved folder the end is recorded."""
        if loss is None:
            return
        with contextlib.suppress(OSError):
            print(f"rank {self.rank.rank}: {loss}", file=sys.stderr, flush=True)
        moved = self.folder_watch.moved_to()
        if moved is None:
            _kill_self(FAILED)
        self.folder = RunFolder(moved)
        self._give_up(loss, kind=rank_env.FOLDER_LOST)

    def _give_up(self, reason: str, code: int = FAILED, kind: str = "GivenUp") -> None:
        """Exit from a watchdog thread, because the main thread may hang."""
        self._end(code, rank_env.RankError(kind, reason, "", user=False))
        _kill_self(code)


def _kill_self(code: int) -> NoReturn:
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
    os._exit(code)


@contextlib.contextmanager
def _temporary_files() -> Iterator[None]:
    """Keep the launcher's temporary folder in use; without a launcher, use one of this process."""
    launchers = os.environ.get(rank_env.FALLBACK_FOLDER)
    if launchers is not None:
        lock = files.hold_temporary_folder(Path(launchers))
        try:
            yield
        finally:
            if lock is not None:
                lock.release()
        return
    files.remove_stale_temporary_folders()
    with files.temporary_folder() as path, rank_env.environment(files.redirect_temporary_files(path)):
        tempfile.tempdir = None  # read again
        yield
    tempfile.tempdir = None


def _rank_main(run: Run) -> None:
    module, _, name = os.environ.get(RANK_MAIN, TRAINER).rpartition(".")
    getattr(importlib.import_module(module), name)(run)


def _call(run: Run) -> tuple[int, rank_env.RankError | None]:
    try:
        _rank_main(run)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            code = error.code or DONE
            ended = rank_env.RankError("SystemExit", f"exit code {code}", traceback.format_exc(), user=False)
            return code, None if code in (DONE, STOPPED) else ended
        return FAILED, rank_env.RankError("SystemExit", str(error.code), traceback.format_exc(), user=False)
    except UserError as error:
        return error.exit_code, rank_env.RankError("UserError", str(error), traceback.format_exc(), user=True)
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next  # skips frames of this file
        text = "".join(traceback.format_exception(type(error), error, frames))
        return FAILED, rank_env.RankError(type(error).__name__, str(error), text, user=isinstance(error, Outcome))
    return DONE, None


if __name__ == "__main__":
    code = main(sys.argv[1:])
    if code in (DONE, STOPPED):
        sys.exit(code)
    # After an error, threads of process groups may wait for peers, and the interpreter would wait for those threads.
    sys.stdout.flush()
    sys.stderr.flush()
    _kill_self(code)
