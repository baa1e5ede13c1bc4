"""Train state: mesh, parallel model, objective, optimizer. Shared by trainer and planner, so predictions match runs."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.optim.build import build_optimizer
from titan_exp.parallel.mesh import Mesh, build_mesh
from titan_exp.parallel.tensor_parallel.apply import vocab_shard
from titan_exp.trainer.build_model import BuiltModel
from titan_exp.trainer.cuda_graphs.capture import CudaRecorder
from titan_exp.trainer.cuda_graphs.graphed_model import GraphedModel
from titan_exp.trainer.forward_backward import EagerModel, Model
from titan_exp.trainer.objective.build import build_objective
from titan_exp.trainer.pipeline_forward_backward import PipelineModel


@dataclass(frozen=True)
class TrainState:
    """Objects that `train_step` works on, on one rank."""

    mesh: Mesh
    """Device mesh."""
    built: BuiltModel
    """The parallel model, with figures of the whole model."""
    model: Model
    """Model and objective behind the interface of `train_step`."""
    optimizer: torch.optim.Optimizer
    """Optimizer of this rank's parameters."""


def assemble(
    experiment: Experiment,
    layout: ResolvedLayout,
    device: torch.device,
    *,
    fake_mode: AbstractContextManager[Any] | None = None,
) -> TrainState:
    """Build mesh, model, objective and optimizer. In a `fake_mode`, parameters get memory and no values.

    Raises:
        UserError: an import path cannot be imported, or a named module does not exist.
    """
    mesh = build_mesh(layout.parallelism, device)
    built = BuiltModel(experiment, layout, mesh, fake_mode=fake_mode)
    shard = vocab_shard(mesh, experiment.model.vocab_size) if experiment.parallelism.loss_parallel else None
    objective = build_objective(experiment.training, experiment.compile, shard)
    model: Model
    if built.pipeline is not None:
        model = PipelineModel(built.pipeline, objective, mesh)
    elif experiment.compile.cuda_graphs:
        dtype = torch.bfloat16 if experiment.training.mixed_precision == "bf16" else torch.float32
        model = GraphedModel(built.module, objective, mesh, CudaRecorder(mesh.device), dtype=dtype)
    else:
        model = EagerModel(built.module, objective, mesh)
    return TrainState(mesh, built, model, build_optimizer(model.parts, experiment.optimizer))
