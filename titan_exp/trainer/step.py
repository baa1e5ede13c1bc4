"""One optimizer step: the recipe of the algorithm."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_exp.data.batch import Batch
from titan_exp.ops.cross_entropy import IGNORE_INDEX
from titan_exp.optim.clip import global_grad_norm, scale_gradients
from titan_exp.parallel.data import synchronize_gradients
from titan_exp.parallel.mesh import Mesh
from titan_exp.parallel.tensor import sum_partial_gradients
from titan_exp.trainer.loss import TokenLoss
from titan_exp.trainer.place import place


@dataclass(frozen=True)
class StepResult:
    """What a step leaves behind, still on the device: nothing here has waited for it."""

    loss: Tensor
    """This rank's share of the mean cross-entropy over the global batch; the sum over data and context ranks is the
    mean."""
    grad_norm: Tensor
    """Global gradient norm before clipping."""
    tokens: int
    """Predicted tokens of the global batch."""


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    *,
    token_loss: TokenLoss,
    tokens: int,
    lr: float,
    max_grad_norm: float | None,
    mesh: Mesh,
) -> StepResult:
    """Train on one global batch, of which `batches` are this rank's micro-batches.

    Args:
        model: parallel model whose gradients are zero.
        optimizer: over the model's parameters.
        batches: micro-batches on the CPU.
        token_loss: what is minimized.
        tokens: predicted tokens of the whole global batch, over all ranks.
        lr: learning rate of this step.
        max_grad_norm: clip above this global norm; None never clips.
        mesh: where this rank stands: its device, and its part of every sequence.
    """
    loss = torch.zeros((), device=mesh.device)
    for index, cpu_batch in enumerate(batches):
        batch = place(cpu_batch, mesh)
        synchronize_gradients(model, last=index == len(batches) - 1)
        loss += forward_backward(model, batch, token_loss, tokens)

    sum_partial_gradients(model, mesh)
    parameters = list(model.parameters())
    grad_norm = global_grad_norm(parameters)
    if max_grad_norm is not None:
        scale_gradients(parameters, grad_norm, max_grad_norm)

    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    return StepResult(loss, grad_norm, tokens)


def forward_backward(model: nn.Module, batch: Batch, token_loss: TokenLoss, tokens: int) -> Tensor:
    """Add a micro-batch's gradients; returns its share of the mean cross-entropy, detached.

    Dividing by the tokens of the whole global batch here makes every sum of gradients, over micro-batches and over
    ranks, the gradient of the global mean, however tokens are spread.
    """
    objective, cross_entropy = token_loss(model, batch)
    (objective / max(tokens, 1)).backward()
    return cross_entropy / max(tokens, 1)


def agree(batches: Sequence[Batch], stop: bool, mesh: Mesh) -> tuple[int, bool]:
    """Predicted tokens of the global batch, and whether any rank was asked to stop: one message over the CPU."""
    predicted = sum(int((batch.labels != IGNORE_INDEX).sum()) for batch in batches)
    message = torch.tensor([predicted, int(stop)])
    if dist.get_world_size(mesh.control) > 1:
        dist.all_reduce(message, group=mesh.control)
    # Rows are counted whole, before they are cut, by every rank that is handed them.
    return int(message[0]) // mesh.copies_of_rows, bool(message[1])
