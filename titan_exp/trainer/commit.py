"""Commit: how the worlds of a run agree on a step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from titan_exp.config.extension import loaded
from titan_exp.config.groups.experiment import Experiment
from titan_exp.data.batch import MicroBatch
from titan_exp.trainer.metrics import Numbers, Row, StepResult
from titan_exp.trainer.train_step import sync_step_flags

if TYPE_CHECKING:
    from titan_exp.trainer.trainer import Trainer


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

    def __init__(self, trainer: "Trainer") -> None:
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
