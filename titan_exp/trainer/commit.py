"""Commit: how the worlds of a run agree on a step, and the objects of the trainer that they and restoring see."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_exp.checkpoint.checkpointer import Checkpointer
from titan_exp.config.extension import loaded
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.data.batch import MicroBatch
from titan_exp.data.train_loader import TrainLoader
from titan_exp.parallel.mesh import Mesh
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.trainer.forward_backward import Model
from titan_exp.trainer.metrics import Numbers, Report, Row, StepResult
from titan_exp.trainer.objective import Objective, token_counts
from titan_exp.trainer.part import Parts
from titan_exp.trainer.train_state import TrainState


class Training(Protocol):
    """One rank of a training run, as commits and restoring see it; `Trainer` implements it."""

    experiment: Experiment
    folder: RunFolder
    layout: ResolvedLayout
    state: TrainState
    mesh: Mesh
    model: Model
    optimizer: torch.optim.Optimizer
    parts: Parts
    loader: TrainLoader
    checkpointer: Checkpointer
    report: Report  # exists once the state is restored
    step: int  # number of steps trained
    tokens: int  # number of predicted tokens in these steps
    ended: str | None  # reason why a part has ended training; None if none has

    @property
    def lr(self) -> float:
        """Learning rate of the last step."""
        ...

    @property
    def is_over(self) -> bool:
        """True after the last step."""
        ...

    def seed(self) -> None:
        """Seed the generators for the next step."""
        ...

    def progress(self) -> dict[str, Any]:
        """State other than tensors and data, as JSON."""
        ...


@dataclass(frozen=True)
class Flags:
    """Decisions at the end of a step that all ranks follow."""

    stop: bool = False
    save: bool = False

    def __or__(self, other: "Flags") -> "Flags":
        return Flags(self.stop or other.stop, self.save or other.save)


class Commit:
    """Agreement of the worlds of a run; this base class has a single world. All ranks of a world call each member
    together, in this order: `restored`, then for each step `meet`, `divide`, `reduce`, `settle`, `rows`, `collect` and
    `resume`, then `finishes` and `leave`."""

    sums = False
    """True if gradients are summed over worlds, in the dtype of their parameters."""
    worlds = 1
    """Worlds that train sequences of the same step, each of which counts its own."""
    leads = True
    """True in the world that writes rows, checkpoints and exports."""
    restores = True
    """True if this world begins with a checkpoint; False if it takes over a living world's state."""
    states: Mapping[str, Tensor] = {}
    """States of other worlds, by their keys in the next checkpoint."""

    def __init__(self, trainer: Training) -> None:
        self._trainer, self._flags, self._result = trainer, Flags(), StepResult({}, torch.zeros(()), 0)

    def takes_over(self) -> bool:
        """True if the state to begin with comes from a living world."""
        return False

    def restored(self) -> None:
        """Called once the initial state is loaded."""

    def meet(self) -> Flags | None:
        """Wait for the other worlds before a step. Returns flags if the present step must first be logged and saved."""
        return None

    def divide(
        self, step: int, batches: Sequence[MicroBatch], flags: Flags
    ) -> tuple[Sequence[MicroBatch], tuple[int, ...]]:
        """Return this world's share of a step, and token counts to divide its loss by; `flags` are this rank's."""
        objective, mesh = self._trainer.model.objective, self._trainer.mesh
        tokens, stop, save = sync_step_flags(objective, batches, mesh, stop=flags.stop, save=flags.save)
        self._flags = Flags(stop, save)
        return batches, tokens

    def reduce(self, parameters: Iterable[nn.Parameter], metrics: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Sum gradients over the worlds in place; return the summed metrics. Raises StepRefused if the worlds repeat
        the step; weights and optimizer are as before it."""
        return metrics

    def settle(self, result: StepResult, *, logs: bool) -> Flags | None:
        """Called after a step, with `logs` if its row is due. Returns flags, or None if the worlds train on alone."""
        self._result = result
        return self._flags

    def rows(self, numbers: Callable[[], Numbers], *, due: bool) -> list[Row]:
        """Return unlogged rows of agreed steps, the last with `numbers`; `due` says that this step has a row."""
        if not due:
            return []
        trainer = self._trainer
        return [trainer.report.row(trainer.step, trainer.tokens, self._result, lr=trainer.lr, also=numbers())]

    def collect(self) -> None:
        """Gather states of other worlds for a checkpoint."""

    def resume(self, flags: Flags) -> None:
        """Called after an agreed step is logged and saved."""

    def finishes(self) -> bool:
        """True in the world that saves and exports the last state. Other worlds return False once it has done so."""
        return True

    def leave(self) -> None:
        """Let the other worlds end, after the last checkpoint and export."""

    def progress(self) -> dict[str, Any]:
        """State of the worlds that a checkpoint stores, as JSON."""
        return {}


def commit_of(experiment: Experiment) -> type[Commit]:
    """Commit class of the extension that trains this run, else `Commit`."""
    found = (commit(experiment) for commit in loaded("commit", experiment))
    return next(filter(None, found), Commit)


def sync_step_flags(
    objective: Objective, batches: Sequence[MicroBatch], mesh: Mesh, *, stop: bool, save: bool
) -> tuple[tuple[int, ...], bool, bool]:
    """Sum the predicted tokens of the global batch, and share the step's flags, in one message over the CPU. Returns
    tokens as `train_step` takes them, True if any rank was asked to stop, and True if rank 0 asks for a checkpoint."""
    tokens = map(sum, zip(*(token_counts(objective, batch) for batch in batches), strict=True))
    message = [*tokens, int(stop), int(save and dist.get_rank() == 0)]
    if dist.get_world_size(mesh.cpu_group) > 1:
        summed = torch.tensor(message)
        dist.all_reduce(summed, group=mesh.cpu_group)
        message = summed.tolist()
    *counts, stops, saves = message
    # Ranks that share rows count them all.
    return tuple(count // mesh.batch_replicas for count in counts), bool(stops), bool(saves)
