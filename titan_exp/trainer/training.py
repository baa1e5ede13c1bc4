"""Training as commits and restoring see it: what the trainer has built, and where it is."""

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
    """One rank of a run; a `Trainer`."""

    experiment: Experiment
    """Configuration."""
    folder: RunFolder
    """Run folder."""
    layout: ResolvedLayout
    """Layout."""
    state: TrainState
    """What a step works on."""
    mesh: Mesh
    """Its mesh."""
    model: Model
    """Its model."""
    optimizer: torch.optim.Optimizer
    """Its optimizer."""
    parts: Parts
    """Parts of training."""
    loader: TrainLoader
    """Micro-batches."""
    checkpointer: Checkpointer
    """Checkpoints of the run."""
    report: Report
    """Rows; once the state is restored."""
    step: int
    """Steps trained."""
    tokens: int
    """Predicted tokens of them."""
    ended: str | None
    """Reason for which a part has ended training; None if none has."""

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
        """State beside tensors and data, as JSON."""
        ...
