"""Train state: mesh, parallel model, objective, optimizer. The trainer and the planner share it, so that
what is predicted is what runs."""

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
from titan_exp.trainer.objective.base import Objective
from titan_exp.trainer.objective.build import build_objective
from titan_exp.trainer.pipeline_forward_backward import PipelineModel


@dataclass(frozen=True)
class TrainState:
    """One rank's part of a run, before its first step."""

    mesh: Mesh
    """Where this process stands among all of them."""
    built: BuiltModel
    """The parallel model, and what is known of the whole of it."""
    model: Model
    """The model as a step takes it."""
    optimizer: torch.optim.Optimizer
    """Over this rank's parameters."""


def assemble(
    experiment: Experiment,
    layout: ResolvedLayout,
    device: torch.device,
    *,
    fake_mode: AbstractContextManager[Any] | None = None,
) -> TrainState:
    """Build everything that `train_step` takes but the batches.

    Args:
        fake_mode: context in which parameters get memory and no values; None makes real ones.

    Raises:
        UserError: a dotted name cannot be imported; a module that is named does not exist.
    """
    mesh = build_mesh(layout.parallelism, device)
    built = BuiltModel(experiment, layout, mesh, fake_mode=fake_mode)
    shard = vocab_shard(mesh, experiment.model.vocab_size) if experiment.parallelism.loss_parallel else None
    model = _model(experiment, built, build_objective(experiment.training, experiment.compile, shard), mesh)
    return TrainState(mesh, built, model, build_optimizer(model.parts, experiment.optimizer))


def _model(experiment: Experiment, built: BuiltModel, objective: Objective, mesh: Mesh) -> Model:
    if built.pipeline is not None:
        return PipelineModel(built.pipeline, objective, mesh)
    if experiment.compile.cuda_graphs:
        dtype = torch.bfloat16 if experiment.training.mixed_precision == "bf16" else torch.float32
        return GraphedModel(built.module, objective, mesh, CudaRecorder(mesh.device), dtype=dtype)
    return EagerModel(built.module, objective, mesh)
