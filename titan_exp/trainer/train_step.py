"""One optimizer step: the whole recipe, with everything that changes weights, in order."""

from collections.abc import Sequence

from titan_exp.data.batch import MicroBatch
from titan_exp.optim.grad_clip import global_grad_norm
from titan_exp.optim.lr_schedule import set_lr
from titan_exp.optim.optimizer import cast_gradients
from titan_exp.parallel.step_observer import step_observer
from titan_exp.parallel.tensor_parallel.styles import reduce_partial_gradients
from titan_exp.trainer.commit import Commit
from titan_exp.trainer.metrics import StepResult
from titan_exp.trainer.part import Parts, Update
from titan_exp.trainer.train_state import TrainState


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
    commit: Commit | None = None,
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
