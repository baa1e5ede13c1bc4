"""Rank process: trains the run in a given run folder and exits with a code. It composes no configuration. Out of
memory, it reports the largest categories, and the options that would lower them."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.optimizer import keeps_fp32_moments
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.secrets import require_variables
from titan_exp.tracking.display import format_bytes
from titan_exp.tracking.logging import PROGRESS, configure_logging, get_logger
from titan_exp.tracking.run_folder.files import LockedError
from titan_exp.tracking.run_folder.run import Run
from titan_exp.tracking.run_folder.run_folder import STOPPED, RunFolder, RunState
from titan_exp.trainer.commit import commit_of
from titan_exp.trainer.distributed import joined
from titan_exp.trainer.profiling import memory_snapshot
from titan_exp.trainer.profiling.slow_options import log_slow_options
from titan_exp.trainer.profiling.step_times import set_compile_cache
from titan_exp.trainer.restore import log_head
from titan_exp.trainer.trainer import Trainer

MIN_SHARE = 0.02  # smallest share of used memory at which lowering a category is worth naming


class OutOfMemory(RuntimeError):
    """A rank ran out of memory."""


@contextmanager
def explain_oom(
    experiment: Experiment, traces: Path, device: torch.device, trainer: "Callable[[], Trainer | None]"
) -> Iterator[None]:
    """Turn an out-of-memory error of the `with` block into OutOfMemory with a report, also written to the folder
    `traces`. `trainer` returns the trainer, or None while it is being built."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        built = trainer()
        of_run: tuple[Any, ...] = (
            () if built is None else (built.model.parts, built.optimizer, built.model.weights.copies)
        )
        memory = memory_snapshot.memory_breakdown(device, *of_run)
        rank = dist.get_rank() if dist.is_initialized() else 0
        try:
            written = f"\nDetails: {memory_snapshot.write_breakdown(memory, traces, 'full', rank)}"
        except OSError as failed:
            get_logger().error("%s: cannot write the memory breakdown (%s)", traces, failed.strerror or failed)
            written = ""
        step = f"in step {built.step + 1}" if built is not None else "while the model was built"
        report = oom_report(memory, experiment, rank=rank, when=step)
        # Torch's message without its paragraph about environment variables.
        said = str(error).partition(" If reserved")[0].partition(" (when allocating")[0].strip()
        raise OutOfMemory(f"{said or type(error).__name__}\n{report}{written}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """True for an out-of-memory error on any device."""
    # The CPU allocator raises a plain RuntimeError.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def oom_report(memory: memory_snapshot.MemoryBreakdown, experiment: Experiment, *, rank: int, when: str) -> str:
    """Text of the three largest categories, each with the options of this run that lower it."""
    used, capacity = format_bytes(memory.used), format_bytes(memory.capacity)
    lines = [f"Rank {rank} ran out of memory {when}: {used} of {capacity} were in use."]
    for category in memory.categories[:3]:
        if category.size > MIN_SHARE * memory.used:
            lines.append(f"  {format_bytes(category.size):>12}  {category.name}")
            lines += [f"{'':16}lower with {remedy}" for remedy in remedies(category, experiment, memory.device)]
    return "\n".join(lines)


def remedies(category: memory_snapshot.MemoryCategory, experiment: Experiment, device: str) -> list[str]:
    """Unused options that lower a memory category, cheapest first."""
    parallelism, training = experiment.parallelism, experiment.training
    more, offload = f"parallelism.dp_shard={2 * parallelism.dp_shard}, on twice as many devices", []
    if device == "cuda" and not parallelism.cpu_offload:
        offload = ["parallelism.cpu_offload=true, which is slow"]
    if category.name == "weights":
        return [more, f"parallelism.tp={2 * parallelism.tp}", *offload]
    if category.name == "gradients":
        return [more, *offload]
    if category.name == "optimizer state":
        lower = [f"optimizer.state_precision={name}" for name in ("bf16", "int8")]
        return [*(lower if keeps_fp32_moments(experiment.optimizer) else []), more, *offload]
    found = []
    rows = ResolvedLayout.of(experiment).micro_batch_size
    if not training.has_given_chunks:
        found.append("training.loss_chunk_tokens=2048")
    if rows > 1:
        found.append(f"training.micro_batch_size={rows // 2}")
    if experiment.activation_checkpoint.mode == "none":
        found += ["activation_checkpoint=selective", "activation_checkpoint=full"]
    elif experiment.activation_checkpoint.mode != "full":
        found.append("activation_checkpoint=full")
    if not experiment.compile.enabled:
        found.append("compile=blocks")
    return [*found, f"parallelism.cp={2 * parallelism.cp}, or a shorter training.seq_len"]


def main(run: Run | str) -> None:
    """Train a run, or the run in a folder, on this rank, from its newest checkpoint to the end. Exits with `STOPPED`,
    after saving, if a stop was requested."""
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
                try:
                    folder.write_state(RunState("running", trainer.step, time.time(), trainer.report.attempt, None))
                except OSError as error:
                    get_logger().error("cannot write %s (%s)", folder.state, error.strerror or error)
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
