"""One optimizer step: the recipe of the algorithm."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from titan_exp.data.batch import Batch
from titan_exp.ops.loss.cross_entropy import IGNORE_INDEX
from titan_exp.optim.fused_clip_adamw import FusedClipAdamW
from titan_exp.optim.grad_clip import clip_factor, global_grad_norm, scale_gradients
from titan_exp.parallel.mesh import Mesh
from titan_exp.parallel.step_observer import step_observer
from titan_exp.parallel.tensor_parallel.apply import reduce_partial_gradients
from titan_exp.trainer.forward_backward import Model


@dataclass(frozen=True)
class StepResult:
    """What a step leaves behind, still on the device: nothing here has waited for it."""

    loss: Tensor
    """This rank's share of the mean cross-entropy over the global batch; the sum over data and context ranks is the
    mean. 0 where another rank has the last stage of a pipeline."""
    grad_norm: Tensor
    """Global gradient norm before clipping."""
    tokens: int
    """Predicted tokens of the global batch."""


def train_step(
    model: Model,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    *,
    tokens: int,
    lr: float,
    max_grad_norm: float | None,
    mesh: Mesh,
) -> StepResult:
    """Train on one global batch, of which `batches` are this rank's micro-batches.

    Args:
        model: its gradients are zero.
        optimizer: over the model's parameters.
        batches: micro-batches on the CPU.
        tokens: predicted tokens of the whole global batch, over all ranks.
        lr: learning rate of this step.
        max_grad_norm: clip above this global norm; None never clips.
        mesh: which ranks hold other parts of the model.
    """
    loss = model.forward_backward(batches, tokens)

    step_observer().gradients_ready(model.parts)
    reduce_partial_gradients(model.parts, mesh)
    grad_norm = global_grad_norm(model.unique_parameters(), mesh.pp_group)
    if max_grad_norm is not None and isinstance(optimizer, FusedClipAdamW):
        optimizer.factor = clip_factor(grad_norm, max_grad_norm)
    elif max_grad_norm is not None:
        scale_gradients(list(model.parameters()), grad_norm, max_grad_norm)

    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    return StepResult(loss, grad_norm, tokens)


def sync_step_flags(batches: Sequence[Batch], mesh: Mesh, *, stop: bool, save: bool) -> tuple[int, bool, bool]:
    """Predicted tokens of the global batch, whether any rank was asked to stop, and whether rank 0 has it time to save.

    One message over the CPU.
    """
    predicted = sum(int((batch.labels != IGNORE_INDEX).sum()) for batch in batches)
    message = torch.tensor([predicted, int(stop), int(save and dist.get_rank() == 0)])
    if dist.get_world_size(mesh.cpu_group) > 1:
        dist.all_reduce(message, group=mesh.cpu_group)
    # Rows are counted whole, before they are cut, by every rank that is handed them.
    return int(message[0]) // mesh.batch_replicas, bool(message[1]), bool(message[2])
