"""Interface of the trainer that commits and restoring see: the objects that it has built, and its position."""

from typing import Any, Protocol

import torch

from titan_exp.checkpoint.checkpointer import Checkpointer
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.data.train_loader import TrainLoader
from titan_exp.parallel.mesh import Mesh
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.trainer.forward_backward import Model
from titan_exp.trainer.metrics import Report
from titan_exp.trainer.part import Parts
from titan_exp.trainer.train_state import TrainState


class Training(Protocol):
    """One rank of a training run; `Trainer` implements it."""

    experiment: Experiment
    """Configuration."""
    folder: RunFolder
    """Run folder."""
    layout: ResolvedLayout
    """Layout."""
    state: TrainState
    """Train state that a step works on."""
    mesh: Mesh
    """Device mesh of the state."""
    model: Model
    """Model of the state."""
    optimizer: torch.optim.Optimizer
    """Optimizer of the state."""
    parts: Parts
    """Parts of training."""
    loader: TrainLoader
    """Loader of micro-batches."""
    checkpointer: Checkpointer
    """Checkpoints of the run."""
    report: Report
    """Training report; exists once the state is restored."""
    step: int
    """Number of steps trained."""
    tokens: int
    """Number of predicted tokens in these steps."""
    ended: str | None
    """Reason why a part has ended training; None if none has."""

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
