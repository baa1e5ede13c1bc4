"""Saving and loading the training state: in the background or not, complete or not at all."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from titan_exp.checkpoint.folder import CheckpointFolder
from titan_exp.checkpoint.reader import read_into, tensor_shapes
from titan_exp.checkpoint.state import (
    DATA,
    PROGRESS,
    allocate_optimizer_state,
    from_bytes,
    gather_state,
    make_copies_equal,
    model_state,
    optimizer_state,
)
from titan_exp.config.checkpoint import CheckpointConfig
from titan_exp.parallel.mesh import new_cpu_group
from titan_exp.tracking.log import get_logger


@dataclass(frozen=True)
class Restored:
    """What a checkpoint says besides tensors."""

    progress: dict[str, Any]
    """Counters of the run."""
    data: dict[str, Any]
    """State of every virtual shard."""


class Checkpointer:
    """Saves and loads the state of one run; every method is called by all ranks together.

    Args:
        config: mode, interval, retention.
        path: the run's `checkpoints/` folder.
    """

    def __init__(self, config: CheckpointConfig, path: Path) -> None:
        self.config = config
        self.folder = CheckpointFolder(path)
        self._pending: tuple[int, Future[Any]] | None = None
        self.durable: int | None = None
        """Step of the last checkpoint that this process knows to be complete."""
        self._newest: int | None = None
        # A group of its own: a background save must not meet the training step's collectives.
        self._group = new_cpu_group()
        self._leader = dist.get_rank() == 0
        if self._leader and config.mode != "off":
            path.mkdir(parents=True, exist_ok=True)
            self.folder.clean()
        dist.barrier(group=self._group)

    def due(self, step: int) -> bool:
        """Whether the configuration asks for a checkpoint after this step."""
        return self.config.mode != "off" and step % self.config.every == 0

    def save(
        self,
        step: int,
        parts: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        data: Mapping[str, Any],
        progress: Mapping[str, Any],
    ) -> None:
        """Save the state after a step, once. In async mode training may go on as soon as this returns."""
        if self.config.mode == "off" or step == self._newest:
            return
        self.wait()
        state = gather_state(parts, optimizer, data, progress)
        writer = dcp.FileSystemWriter(self.folder.partial(step), single_file_per_rank=True, sync_files=True)
        if self.config.mode == "sync":
            self._finish(step, lambda: dcp.save(state, storage_writer=writer, process_group=self._group))
        else:
            # torch copies to the CPU before it returns, but takes what is there already as it is.
            staged = {key: value.clone() if value.device.type == "cpu" else value for key, value in state.items()}
            future = dcp.async_save(staged, storage_writer=writer, process_group=self._group)
            assert isinstance(future, Future), "the default staging is synchronous"
            self._pending = (step, future)
        self._newest = step

    def poll(self) -> None:
        """Make a finished background save complete; called between steps."""
        if self._pending is not None and self._pending[1].done():
            self.wait()

    def wait(self) -> None:
        """Wait until a background save is durable.

        A save that failed (a full disk) is reported and forgotten: the last complete checkpoint stays.
        """
        if self._pending is None:
            return
        (step, future), self._pending = self._pending, None
        self._finish(step, future.result)

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint, agreed on by all ranks."""
        steps: list[Any] = [self.folder.complete()[-1:] if self._leader else None]
        dist.broadcast_object_list(steps, src=0, group=self._group)
        return steps[0][0] if steps[0] else None

    def load(self, step: int, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> Restored:
        """Load a checkpoint, made in any layout, into the model (or its parts on this rank) and the optimizer."""
        path = self.folder.at(step)
        allocate_optimizer_state(parts, optimizer)
        tensors = {**model_state(parts), **optimizer_state(parts, optimizer)}
        notes = {
            key: torch.empty(shape, dtype=torch.uint8)
            for key, shape in tensor_shapes(path).items()
            if key == PROGRESS or key.startswith(DATA)
        }
        read_into(path, {**tensors, **notes})
        make_copies_equal(parts, optimizer)
        self._newest = self.durable = step
        data = {key.removeprefix(DATA): from_bytes(notes[key]) for key in notes if key.startswith(DATA)}
        return Restored(from_bytes(notes[PROGRESS]), data)

    def _finish(self, step: int, write: Callable[[], object]) -> None:
        """Write, then publish; torch raises on every rank where the writing of one has failed."""
        try:
            write()
        except (dcp.CheckpointException, OSError) as error:
            get_logger().error(
                "the checkpoint of step %d could not be written; training goes on with the last complete one: %s",
                step,
                _cause(error),
            )
            self._newest = None
            return
        self.durable = step
        if self._leader:
            self.folder.publish(step)
            self.folder.retain(self.config.keep)


def _cause(error: BaseException) -> str:
    """What went wrong on the first rank where something did, in one line."""
    if isinstance(error, dcp.CheckpointException) and error.failures:
        rank, (cause, _) = sorted(error.failures.items())[0]
        return f"rank {rank}: {cause}"
    return str(error)


def load_model(path: Path, model: nn.Module) -> None:
    """Load a checkpoint's weights alone into a model."""
    state: dict[str, Tensor] = model_state([model])
    read_into(path, state)
