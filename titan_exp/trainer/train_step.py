"""One optimizer step: the whole recipe, with everything that changes weights, in order."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from titan_exp.data.batch import MicroBatch
from titan_exp.optim.grad_clip import global_grad_norm
from titan_exp.optim.lr_schedule import set_lr
from titan_exp.optim.optimizer import cast_gradients
from titan_exp.parallel.mesh import Mesh
from titan_exp.parallel.step_observer import step_observer
from titan_exp.parallel.tensor_parallel.styles import reduce_partial_gradients
from titan_exp.trainer.metrics import StepResult
from titan_exp.trainer.objective import Objective, token_counts
from titan_exp.trainer.part import Parts, Update
from titan_exp.trainer.train_state import TrainState

if TYPE_CHECKING:
    from titan_exp.trainer.commit import Commit


class StepRefused(Exception):
    """The worlds of a run must repeat the step, because one died or a collective between them failed."""


def train_step(
    state: TrainState,
    parts: Parts,
    batches: Sequence[MicroBatch],
    *,
    step: int,
    tokens: Sequence[int],
    lr: float,
    commit: "Commit | None" = None,
) -> StepResult:
    """Train on one global batch; `batches` are this rank's CPU micro-batches of it. `tokens` are as of `token_counts`.
    If `commit` raises, weights and optimizer are as before the step."""
    model, optimizer = state.model, state.optimizer
    if state.gradient_point is not None:
        state.gradient_point.to_gradient_point()
        state.refresh()
    metrics = model.forward_backward(batches, tokens)

    observer = step_observer()
    observer.gradients_ready(model.parts)
    reduce_partial_gradients(model.parts, state.mesh)
    sums = commit is not None and commit.sums
    if not state.updates_compute_weights or state.clipper.in_place or sums:
        cast_gradients(model.parameters())
    if commit is not None:
        metrics = commit.reduce(model.parameters(), metrics)
    grad_norm = global_grad_norm(model.unique_parameters(), state.mesh.pp_group)
    clipping = state.clipper.clip(grad_norm, step=step)

    set_lr(optimizer, lr)
    update = Update(step, state, grad_norm, lr)
    parts.on_gradients(update)
    observer.update_begin(optimizer)
    optimizer.step()
    parts.on_update(update, acting=True)
    observer.update_end(optimizer)
    if not state.updates_compute_weights:
        model.weights.refresh()
    state.quantize_weights()
    parts.on_update(update, acting=False)
    optimizer.zero_grad()
    return StepResult(metrics, grad_norm, tokens[0], clipping)


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
