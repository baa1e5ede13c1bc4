"""One optimizer step: the recipe of the algorithm."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_exp.data.batch import MicroBatch
from titan_exp.optim.clipping.clipper import GradientClipper
from titan_exp.optim.compute_weights import UpdatesComputeWeights, cast_gradients
from titan_exp.optim.grad_clip import clip_gradients, global_grad_norm
from titan_exp.optim.gradient_point import HasGradientPoint
from titan_exp.optim.lr_schedule import set_lr
from titan_exp.parallel.mesh import Mesh
from titan_exp.parallel.step_observer import step_observer
from titan_exp.parallel.tensor_parallel.apply import reduce_partial_gradients
from titan_exp.trainer.forward_backward import Model
from titan_exp.trainer.objective.base import Objective, token_counts


class Diverged(RuntimeError):
    """Loss or gradients are no longer finite."""


@dataclass(frozen=True)
class StepResult:
    """Result of a step, still on the device: reading a tensor synchronizes."""

    metrics: Mapping[str, Tensor]
    """This rank's share of the mean `loss` and of the objective's metrics, before reduction over ranks."""
    grad_norm: Tensor
    """Global gradient norm before clipping."""
    tokens: int
    """Predicted tokens of the global batch."""
    clipping: Mapping[str, Tensor] = field(default_factory=dict)
    """Metrics of a `GradientClipper`, the same on every rank."""


class CommitStep(Protocol):
    """Agreement of replica groups about a step."""

    def __call__(self, parameters: Iterable[nn.Parameter], metrics: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Sum gradients, in place, and metrics over the groups. Returns the metrics; raises if the step is refused."""
        ...


def train_step(
    model: Model,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[MicroBatch],
    *,
    tokens: Sequence[int],
    lr: float,
    max_grad_norm: float | None,
    mesh: Mesh,
    clipper: GradientClipper | None = None,
    commit: CommitStep | None = None,
) -> StepResult:
    """Train on one global batch, of which `batches` are this rank's CPU micro-batches.

    `tokens` are its predicted tokens, then those of each further prediction. A `clipper` takes the place of clipping to
    `max_grad_norm`. If `commit` raises, weights and optimizer are as before the step.
    """
    if isinstance(optimizer, HasGradientPoint):
        optimizer.to_gradient_point()
    metrics = model.forward_backward(batches, tokens)

    step_observer().gradients_ready(model.parts)
    reduce_partial_gradients(model.parts, mesh)
    updates_compute_weights = isinstance(optimizer, UpdatesComputeWeights)
    if not updates_compute_weights or clipper is not None or commit is not None:
        cast_gradients(model.parameters())
    if commit is not None:
        metrics = commit(model.parameters(), metrics)
    grad_norm = global_grad_norm(model.unique_parameters(), mesh.pp_group)
    clipping: Mapping[str, Tensor] = {}
    if clipper is not None:
        clipping = clipper.clip(grad_norm)
    elif max_grad_norm is not None:
        clip_gradients(optimizer, model.parameters(), grad_norm, max_grad_norm)

    set_lr(optimizer, lr)
    optimizer.step()
    if not updates_compute_weights:
        model.weights.refresh()
    optimizer.zero_grad()
    if model.load is not None:
        model.load.update()
    return StepResult(metrics, grad_norm, tokens[0], clipping)


def sync_step_flags(
    objective: Objective, batches: Sequence[MicroBatch], mesh: Mesh, *, stop: bool, save: bool
) -> tuple[tuple[int, ...], bool, bool]:
    """Sum the predicted tokens of the global batch, and share the flags of the step, in one message over the CPU.

    Returns the tokens as `train_step` takes them, True if any rank was asked to stop, and True if rank 0's clock asks
    for a checkpoint.
    """
    tokens = torch.tensor([token_counts(objective, batch) for batch in batches]).sum(0)
    message = torch.cat((tokens, torch.tensor([int(stop), int(save and dist.get_rank() == 0)])))
    if dist.get_world_size(mesh.cpu_group) > 1:
        dist.all_reduce(message, group=mesh.cpu_group)
    *counts, stops, saves = message.tolist()
    # Ranks that share rows count them all.
    return tuple(count // mesh.batch_replicas for count in counts), bool(stops), bool(saves)


def require_finite(step: int, loss: float, grad_norm: float) -> None:
    """Raise Diverged if the loss or the gradient norm of a step is not finite."""
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise Diverged(
            f"step {step}: loss {loss}, gradient norm {grad_norm}. The last checkpoint is from before. "
            "A lower optimizer.lr or a longer lr_schedule.warmup_steps may help; "
            "training.stop_on_nonfinite=false trains on."
        )
