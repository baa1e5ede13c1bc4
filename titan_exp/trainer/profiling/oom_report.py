"""Memory ran out: who had it, and which options lower that, around the error that says where."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.optimizer import keeps_fp32_moments
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.tracking.logging import get_logger
from titan_exp.trainer.profiling.memory_breakdown import Consumer, MemoryAccount, gib, memory_account
from titan_exp.trainer.profiling.memory_snapshot import write_account

if TYPE_CHECKING:
    from titan_exp.trainer.trainer import Trainer


LITTLE = 0.02
"""Share of the memory in use below which lowering a consumer does not help."""


class OutOfMemory(RuntimeError):
    """A rank's memory is full."""


@contextmanager
def memory_explained(
    experiment: Experiment, traces: Path, device: torch.device, trainer: "Callable[[], Trainer | None]"
) -> Iterator[None]:
    """Add to an out-of-memory error of the block what the memory holds, and write that into the `traces` folder.

    Args:
        experiment: the run.
        traces: folder for the account and, on CUDA, the snapshot.
        device: what trains.
        trainer: gives the trainer as soon as there is one.

    Raises:
        OutOfMemory: from the error, whose traceback stays.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        there = trainer()
        parts: Sequence[torch.nn.Module] = there.model.parts if there is not None else ()
        account = memory_account(device, parts, there.optimizer if there is not None else None)
        rank = dist.get_rank() if dist.is_initialized() else 0
        try:
            written = f"\nMore is in {write_account(account, traces, 'full', rank)}"
        except OSError as failed:
            get_logger().error("%s: memory cannot be written down (%s)", traces, failed.strerror or failed)
            written = ""
        step = f"in step {there.step + 1}" if there is not None else "while the model was built"
        raise OutOfMemory(
            f"{_words(error)}\n{explanation(account, experiment, rank=rank, when=step)}{written}"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error means out of memory, on any device."""
    # The CPU's allocator has no error of its own.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def explanation(account: MemoryAccount, experiment: Experiment, *, rank: int, when: str) -> str:
    """The biggest consumers, and what would lower each of them in this run."""
    lines = [f"Rank {rank} ran out of memory {when}: {gib(account.used)} of {gib(account.capacity)} were in use."]
    for consumer in account.consumers[:3]:
        if consumer.size > LITTLE * account.used:
            lines.append(f"  {gib(consumer.size):>12}  {consumer.name}")
            lines += [f"{'':16}lower with {remedy}" for remedy in remedies(consumer, experiment, account.device)]
    return "\n".join(lines)


def remedies(consumer: Consumer, experiment: Experiment, device: str) -> list[str]:
    """Options that lower a consumer and are not in use yet, the least costly first."""
    parallelism, training = experiment.parallelism, experiment.training
    more = f"parallelism.dp_shard={2 * parallelism.dp_shard}, on twice as many devices"
    if consumer.name == "weights":
        return [more, f"parallelism.tp={2 * parallelism.tp}", *_offload(experiment, device)]
    if consumer.name == "gradients":
        return [more, *_offload(experiment, device)]
    if consumer.name == "optimizer state":
        lower = [f"optimizer.state_precision={name}" for name in ("bf16", "int8")]
        return [*(lower if keeps_fp32_moments(experiment.optimizer) else []), more, *_offload(experiment, device)]
    found = []
    rows = ResolvedLayout.of(experiment).micro_batch_size
    if training.loss_chunk_tokens is None:
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


def _offload(experiment: Experiment, device: str) -> list[str]:
    possible = device == "cuda" and not experiment.parallelism.cpu_offload
    return ["parallelism.cpu_offload=true, which is slow"] if possible else []


def _words(error: BaseException) -> str:
    """Torch's message without its paragraph about environment variables."""
    return str(error).partition(" If reserved")[0].partition(" (when allocating")[0].strip() or type(error).__name__
