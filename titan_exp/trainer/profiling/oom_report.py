"""Out-of-memory report: the largest categories, and the options that would lower them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.optimizer import keeps_fp32_moments
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.number_format import format_bytes
from titan_exp.trainer.profiling.memory_snapshot import (
    MemoryBreakdown,
    MemoryCategory,
    memory_breakdown,
    write_breakdown,
)

if TYPE_CHECKING:
    from titan_exp.trainer.trainer import Trainer


MIN_SHARE = 0.02
"""Smallest share of used memory at which lowering a category is worth naming."""


class OutOfMemory(RuntimeError):
    """A rank ran out of memory."""


@contextmanager
def explain_oom(
    experiment: Experiment, traces: Path, device: torch.device, trainer: "Callable[[], Trainer | None]"
) -> Iterator[None]:
    """Turn an out-of-memory error of the `with` block into a report, also written to the folder `traces`.

    `trainer` returns the trainer, or None while it is being built.

    Raises:
        OutOfMemory: from the original error.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        built = trainer()
        memory = (
            memory_breakdown(device)
            if built is None
            else memory_breakdown(device, built.model.parts, built.optimizer, built.model.weights.copies)
        )
        rank = dist.get_rank() if dist.is_initialized() else 0
        try:
            written = f"\nDetails: {write_breakdown(memory, traces, 'full', rank)}"
        except OSError as failed:
            get_logger().error("%s: cannot write the memory breakdown (%s)", traces, failed.strerror or failed)
            written = ""
        step = f"in step {built.step + 1}" if built is not None else "while the model was built"
        report = oom_report(memory, experiment, rank=rank, when=step)
        raise OutOfMemory(f"{_first_sentences(error)}\n{report}{written}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """True for an out-of-memory error on any device."""
    # The CPU allocator raises a plain RuntimeError.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def oom_report(memory: MemoryBreakdown, experiment: Experiment, *, rank: int, when: str) -> str:
    """Text of the three largest categories, each with the options of this run that lower it."""
    used, capacity = format_bytes(memory.used), format_bytes(memory.capacity)
    lines = [f"Rank {rank} ran out of memory {when}: {used} of {capacity} were in use."]
    for category in memory.categories[:3]:
        if category.size > MIN_SHARE * memory.used:
            lines.append(f"  {format_bytes(category.size):>12}  {category.name}")
            lines += [f"{'':16}lower with {remedy}" for remedy in remedies(category, experiment, memory.device)]
    return "\n".join(lines)


def remedies(category: MemoryCategory, experiment: Experiment, device: str) -> list[str]:
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


def _first_sentences(error: BaseException) -> str:
    """Torch's message without its paragraph about environment variables."""
    return str(error).partition(" If reserved")[0].partition(" (when allocating")[0].strip() or type(error).__name__
