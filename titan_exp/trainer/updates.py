"""Parts of a step: changes of weights or routers after the optimizer, which the planner runs, too; and validation, the
loss over the whole split, which is the same number in every layout."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import torch

from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.schema.data_sets import BITS, LOSS
from titan_exp.data.batch import MicroBatch
from titan_exp.data.validation_loader import ValidationLoader
from titan_exp.ops.cross_entropy import IGNORE_INDEX
from titan_exp.optim.grad_clip import AVERAGE_NORM, GradientClipper, NormClipper
from titan_exp.optim.weight_average import AVERAGE, WeightAverage
from titan_exp.parallel.mesh import Mesh
from titan_exp.parallel.qk_clip import QKClip
from titan_exp.tracking.logging import PROGRESS, get_logger
from titan_exp.trainer.experts import ExpertLoad
from titan_exp.trainer.forward_backward import Model, evaluating
from titan_exp.trainer.part import Part, Phase, Run, Step, Update
from titan_exp.trainer.train_state import TrainState


class Acting(Part):
    """Built-in part that draws no random numbers and leaves training modes as they are."""

    phase: ClassVar[Phase] = Phase.ACT
    isolated: ClassVar[bool] = False


class LogitClipping(Acting):
    """QK-Clip: limits attention logits by scaling queries and keys."""

    name = "qk_clip"

    def __init__(self, clip: QKClip) -> None:
        self._clip = clip

    @property
    def maxima(self) -> Sequence[torch.Tensor]:  # type: ignore[override]
        return self._clip.largest

    def on_update(self, update: Update) -> None:
        self._clip.clip()


class ClippingState(Acting):
    """Averages of gradient norms, kept as optimizer state, and the step at which they began."""

    name = "clipping"
    keeps = (AVERAGE_NORM,)

    def __init__(self, clipper: GradientClipper | NormClipper) -> None:
        self._clipper = clipper

    def state(self) -> dict[str, Any]:
        """Step at which the averages began."""
        return self._clipper.state()

    def restore(self, state: Mapping[str, Any] | None, step: int) -> None:
        self._clipper.restore(state, step)

    def on_update(self, update: Update) -> None:
        """Add the averages of parameters that the optimizer's state does not have yet."""
        self._clipper.keep()


class Averaging(Acting):
    """Average of the weights over steps."""

    name = AVERAGE
    keeps = (AVERAGE,)

    def __init__(self, average: WeightAverage) -> None:
        self._average = average

    def state(self) -> dict[str, Any]:
        """Kind of the average and its number of steps; the average itself is in the optimizer's state."""
        return self._average.progress()

    def restore(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Continue the average of a checkpoint, or log from where a shorter one begins."""
        if (shorter := self._average.restore(state, step)) is not None:
            get_logger().warning(shorter)

    def on_update(self, update: Update) -> None:
        self._average.update(update.step)


class Routing(Acting):
    """Load balance of experts: each router learns the load of the global batch. The biases of routers are not weights,
    which other parts keep in another dtype."""

    name = "routing"
    phase = Phase.OBSERVE

    def __init__(self, load: ExpertLoad, training: TrainingConfig) -> None:
        self._load, self._training = load, training
        self.shares = 1
        """Number of equal parts of a batch, each of which is counted and balanced alone."""

    @property
    def sums(self) -> Sequence[torch.Tensor]:  # type: ignore[override]
        return self._load.step_sums

    def before(self, step: int) -> None:
        self._load.set_sequences(self._training.batch_size_at(step) // self.shares)

    def on_update(self, update: Update) -> None:
        self._load.update()

    def refused(self, step: int) -> None:
        self._load.discard()


@dataclass(frozen=True)
class ValidationResult:
    """Validation loss of one source."""

    loss: float  # nats per token
    tokens: int
    text_bytes: int = 0  # bytes of text that they stand for; 0 if unknown

    @property
    def perplexity(self) -> float:
        """exp(loss), infinite on overflow."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits that the model takes for a byte of text, ends of documents included: a ratio of sums."""
        return self.loss * self.tokens / (math.log(2) * self.text_bytes)


class Evaluation(Part):
    """Evaluation on the whole validation split and on further sets, when `due` says so and at the end."""

    name = "evaluation"
    isolated = False  # it draws nothing, and sets its modes itself

    def __init__(
        self,
        state: TrainState,
        loader: ValidationLoader,
        due: Callable[[int], bool],
        sets: Mapping[str, ValidationLoader] = {},
    ) -> None:
        self._state, self._loader, self._due, self._sets = state, loader, due, sets

    def begin(self, run: Run) -> None:
        """Label recompilations in an evaluation as such."""
        self._compilation = run.report.compilation

    def due(self, step: int, *, last: bool) -> bool:
        """True after the last step, too."""
        return last or self._due(step)

    def after(self, step: Step) -> dict[str, float | int | None] | None:
        """Losses of the weights and of their average."""
        if not step.agreed or not self.due(step.step, last=step.last):
            return None
        average = self._state.average
        numbers = self._row()
        if average is not None and average.steps:
            with average.in_use():
                numbers |= averaged_row(self._row())
        self._compilation.after(self.name, step.step)
        return {**numbers}

    def _row(self) -> dict[str, float | int]:
        model, mesh = self._state.model, self._state.mesh
        row = evaluate_split(model, self._loader, mesh)
        for name, loader in self._sets.items():
            found = evaluate_split(model, loader, mesh)
            for metric, value in found.items():
                kind, slash, rest = metric.partition("/")
                if kind in (LOSS, BITS):
                    row[f"{kind}/{name}{slash}{rest}"] = value
        return row


def evaluate_sources(
    model: Model, sources: Mapping[str, Iterable[MicroBatch]], mesh: Mesh, token_bytes: np.ndarray | None = None
) -> dict[str, float | int]:
    """Validation metrics: `validation_loss` over all sources, and for a mixture `validation_loss/NAME` of each source.
    `sources` are this data rank's shares of splits. With `token_bytes` [vocab], also bits per byte."""
    found = {name: evaluate(model, batches, mesh, token_bytes) for name, batches in sources.items()}
    results = [*found.values()]
    tokens, text_bytes = sum(each.tokens for each in results), sum(each.text_bytes for each in results)
    total = sum(each.loss * each.tokens for each in results if each.tokens)
    # The loss of a single source is not rounded by multiplying and dividing.
    mean = ValidationResult(total / tokens if tokens else math.nan, tokens, text_bytes)
    whole = results[0] if len(results) == 1 else mean
    perplexity = {"validation_perplexity": whole.perplexity} if getattr(model.objective, "has_perplexity", True) else {}
    each = found if len(found) > 1 else {}
    bits = {"": whole, **{f"/{name}": result for name, result in each.items()}}
    return {
        LOSS: whole.loss,
        **perplexity,
        "validation_tokens": whole.tokens,
        **{f"{LOSS}/{name}": result.loss for name, result in each.items()},
        **{f"{BITS}{name}": one.bits_per_byte for name, one in bits.items() if one.text_bytes},
    }


def evaluate_split(model: Model, loader: ValidationLoader, mesh: Mesh) -> dict[str, float | int]:
    """Validation metrics of a loader's sources, and those that the data source adds."""
    row = evaluate_sources(model, loader.sources, mesh, loader.token_bytes)
    more = loader.further_metrics(loader.sources, row, lambda sources: evaluate_sources(model, sources, mesh))
    return {**row, **more}


def averaged_row(row: Mapping[str, float | int]) -> dict[str, float | int]:
    """Losses of the averaged weights, under names of their own."""
    left_out = ("validation_perplexity", "validation_tokens")
    return {f"averaged/{name}": value for name, value in row.items() if name not in left_out}


def evaluate(
    model: Model, batches: Iterable[MicroBatch], mesh: Mesh, token_bytes: np.ndarray | None = None
) -> ValidationResult:
    """Run the model on this data rank's share of a split; every rank has the same number of batches."""
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    tokens, text_bytes, rest = 0, 0, map(getattr(model.objective, "prepare_evaluation", lambda batch: batch), batches)
    with evaluating(model):
        while group := list(islice(rest, model.eval_microbatches)):
            tokens += sum(model.objective.count(batch) for batch in group)
            if token_bytes is not None:
                labels = torch.cat([batch.labels.flatten() for batch in group])  # type: ignore[union-attr]  # of text
                text_bytes += int(token_bytes[labels[labels != IGNORE_INDEX].numpy()].sum())
            total += model.loss_sum(group)
            PROGRESS.keep_alive()
    sums = torch.tensor([float(total), tokens, text_bytes], dtype=torch.float64)
    torch.distributed.all_reduce(sums, group=mesh.cpu_group)
    # Tokens are counted in whole rows, while losses are of this rank's tokens.
    loss, predicted, of_text = sums[0] / mesh.loss_replicas, *(sums[1:] / mesh.batch_replicas)
    return ValidationResult(float(loss / predicted) if predicted else math.nan, int(predicted), int(of_text))
