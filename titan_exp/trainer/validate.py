"""Validation: loss over the whole split, the same number in every layout."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist

from titan_exp.data.batch import MicroBatch
from titan_exp.data.validation_loader import ValidationLoader
from titan_exp.parallel.mesh import Mesh
from titan_exp.tracking.progress import PROGRESS
from titan_exp.trainer.forward_backward import Model
from titan_exp.trainer.part import Part, Run, Step
from titan_exp.trainer.train_state import TrainState


@dataclass(frozen=True)
class ValidationResult:
    """Validation loss of one source."""

    loss: float
    """Mean over tokens, in nats."""
    tokens: int
    """Number of predicted tokens."""

    @property
    def perplexity(self) -> float:
        """exp(loss), infinite on overflow."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


class Evaluation(Part):
    """Evaluation over the whole validation split every `every` steps and at the end."""

    name = "evaluation"
    isolated = False  # it draws nothing, and sets its modes itself

    def __init__(self, state: TrainState, loader: ValidationLoader, every: int) -> None:
        self._state, self._loader, self._every = state, loader, every

    def begin(self, run: Run) -> None:
        """Name recompilations of an evaluation as such."""
        self._compilation = run.report.compilation

    def due(self, step: int, *, last: bool) -> bool:
        """True after every `every` steps, and the last."""
        return last or step % self._every == 0

    def after(self, step: Step) -> dict[str, float | int | None] | None:
        """Losses of the weights, and of their average."""
        if not step.agreed or not self.due(step.step, last=step.last):
            return None
        model, average, mesh = self._state.model, self._state.average, self._state.mesh
        numbers = dict[str, float | int | None](evaluate_split(model, self._loader, mesh))
        if average is not None and average.steps:
            with average.in_use():
                numbers |= averaged_row(evaluate_split(model, self._loader, mesh))
        self._compilation.after(self.name, step.step)
        return numbers


def evaluate_sources(model: Model, sources: Mapping[str, Iterable[MicroBatch]], mesh: Mesh) -> dict[str, float | int]:
    """Validation metrics: `validation_loss` over all sources, and for a mixture `validation_loss/NAME` of each source.

    `sources` maps names to this data rank's share of each split.
    """
    found = {name: evaluate(model, batches, mesh) for name, batches in sources.items()}
    tokens = sum(result.tokens for result in found.values())
    total = sum(result.loss * result.tokens for result in found.values() if result.tokens)
    # The loss of a single source is not rounded by multiplying and dividing.
    whole = (
        next(iter(found.values()))
        if len(found) == 1
        else ValidationResult(total / tokens if tokens else math.nan, tokens)
    )
    perplexity = {"validation_perplexity": whole.perplexity} if getattr(model.objective, "has_perplexity", True) else {}
    return {
        "validation_loss": whole.loss,
        **perplexity,
        "validation_tokens": whole.tokens,
        **{f"validation_loss/{name}": result.loss for name, result in found.items() if len(found) > 1},
    }


def evaluate_split(model: Model, loader: ValidationLoader, mesh: Mesh) -> dict[str, float | int]:
    """Validation metrics of a loader's sources, and those that the source of the data adds."""
    row = evaluate_sources(model, loader.sources, mesh)
    more = loader.further_metrics(loader.sources, row, lambda sources: evaluate_sources(model, sources, mesh))
    return {**row, **more}


def averaged_row(row: Mapping[str, float | int]) -> dict[str, float | int]:
    """Losses of an evaluation of the averaged weights, under names of their own."""
    left_out = ("validation_perplexity", "validation_tokens")
    return {f"averaged/{name}": value for name, value in row.items() if name not in left_out}


@torch.no_grad()
def evaluate(model: Model, batches: Iterable[MicroBatch], mesh: Mesh) -> ValidationResult:
    """Run the model over this data rank's share of a split, of which every rank has as many batches."""
    for part in model.parts:
        part.eval()
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    tokens, rest = 0, map(getattr(model.objective, "prepare_evaluation", lambda batch: batch), batches)
    while group := list(islice(rest, model.eval_microbatches)):
        tokens += sum(model.objective.count(batch) for batch in group)
        total += model.loss_sum(group)
        PROGRESS.keep_alive()
    for part in model.parts:
        part.train()
    sums = torch.stack((total.cpu(), torch.tensor(float(tokens), dtype=torch.float64)))
    dist.all_reduce(sums, group=mesh.cpu_group)
    # Tokens are counted in whole rows, losses are of this rank's tokens.
    loss, predicted = sums[0] / mesh.loss_replicas, sums[1] / mesh.batch_replicas
    return ValidationResult(float(loss / predicted) if predicted else math.nan, int(predicted))
