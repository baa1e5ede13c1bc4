"""Rank process: trains the run in a given run folder and exits with a code. It composes no configuration."""

import os
import sys
import time

import torch.distributed as dist

from titan_exp.config.secrets import require_variables
from titan_exp.tracking.logging import PROGRESS, configure_logging, get_logger
from titan_exp.tracking.run_folder.files import LockedError
from titan_exp.tracking.run_folder.run import Run
from titan_exp.tracking.run_folder.run_folder import STOPPED, RunFolder, RunState
from titan_exp.trainer.commit import commit_of
from titan_exp.trainer.distributed import joined
from titan_exp.trainer.profiling.compile_report import set_compile_cache
from titan_exp.trainer.profiling.oom_report import explain_oom
from titan_exp.trainer.profiling.slow_options import log_slow_options
from titan_exp.trainer.restore import log_head
from titan_exp.trainer.trainer import Trainer


def main(run: Run | str) -> None:
    """Train a run, or the run in a folder, on this rank, from its newest checkpoint to the end.

    Raises:
        SystemExit: with `STOPPED`, after saving, if a stop was requested.
    """
    run = run if isinstance(run, Run) else Run(run)
    folder, experiment = RunFolder(run), run.experiment
    require_variables(experiment)
    rank = int(os.environ.get("RANK", "0"))
    configure_logging(rank, folder.logs)
    if rank == 0:
        log_head(folder)
    set_compile_cache(folder, experiment.experiment.name)
    with joined(experiment.cluster) as device:
        trainer: Trainer | None = None
        with explain_oom(experiment, folder.traces, device, lambda: trainer):
            trainer = Trainer(experiment, folder, device, commit_of(experiment))
            log_slow_options(experiment)
            if trainer.loader.guarantee:
                get_logger().info(trainer.loader.guarantee)
            trainer.restore()
            if dist.get_rank() == 0 and trainer.commit.restores:
                _write_running(folder, trainer)
                _record_data(folder, trainer)
            state = "failed"
            try:
                state = "done" if trainer.run() else "preempted"
            finally:
                with PROGRESS.phase("the end"):
                    trainer.report.close(state)
    if state == "preempted":
        get_logger().info("stopped and saved after step %d", trainer.step)
        sys.exit(STOPPED)


def _record_data(folder: RunFolder, trainer: Trainer) -> None:
    """Record the identity of the data in this attempt's row, and log how it differs from the last attempt's."""
    attempt, present = trainer.report.attempt, trainer.loader.corpus
    rows = folder.read_attempts()
    recorded = [row.data for row in rows if row.data is not None and row.attempt < attempt]
    for key, before in recorded[-1].items() if recorded else ():
        if key in present and present[key] != before:
            get_logger().warning("%s changed since the last attempt, from %s to %s", key, before, present[key])
    if not rows:  # started without a launcher
        return
    try:
        folder.update_attempt(attempt, data=present)
    except (OSError, LockedError) as error:
        get_logger().error("cannot record the identity of the data (%s)", error)


def _write_running(folder: RunFolder, trainer: Trainer) -> None:
    try:
        folder.write_state(RunState("running", trainer.step, time.time(), trainer.report.attempt, None))
    except OSError as error:
        get_logger().error("cannot write %s (%s)", folder.state, error.strerror or error)
