"""Multi-token prediction (DeepSeek-AI 2024, V3): language modeling, and that of tokens further ahead, weighted."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titan_exp.data.batch import Batch
from titan_exp.ops.loss.cross_entropy import LossSum
from titan_exp.trainer.objective.base import Loss, Reduction
from titan_exp.trainer.objective.language_modeling import LanguageModeling


@dataclass(frozen=True)
class MultiTokenPrediction:
    """An objective whose loss is also that of the model's modules of multi-token prediction.

    The objective is main + weight / depth * (sum of the modules' means), every mean over the tokens that its module
    predicts in the global batch. The logged loss is the main one. Batches without `further`, as in evaluation, do not
    run the modules.
    """

    main: LanguageModeling
    """Objective of the model and of every module."""
    depth: int
    """Number of modules."""
    weight: float
    """Factor of the modules' mean loss."""

    @property
    def metrics(self) -> Mapping[str, Reduction]:
        """Metrics of the main objective, and each module's cross-entropy without the weight."""
        return {**self.main.metrics, **{f"mtp_loss_{number}": "mean" for number in range(1, self.depth + 1)}}

    def count(self, batch: Batch) -> int:
        """Items of the main objective."""
        return self.main.count(batch)

    def __call__(self, model: nn.Module, batch: Batch, hidden: Tensor | None = None) -> Loss:
        """Compute the losses of a batch from one call of the head."""
        if not batch.further:
            return self.main(model, batch, hidden)
        parts = (batch, *batch.further)
        inputs = (batch.tokens if hidden is None else hidden, batch.positions, batch.documents)
        further = torch.stack([part.tokens for part in batch.further])

        def loss(states: Tensor, weight: Tensor) -> tuple[LossSum, ...]:
            pairs = zip(states.chunk(len(parts)), parts, strict=True)
            return tuple(self.main.chunked_loss(state, weight, part) for state, part in pairs)

        if self.main.chunk_tokens is None:
            logits = model(*inputs, further=further).chunk(len(parts))
            main, *others = [self.main.loss(part, of) for part, of in zip(logits, parts, strict=True)]
        else:
            main, *others = map(self.main.with_metrics, model(*inputs, loss=loss, further=further))
        factor = self.weight / self.depth
        modules = [
            Loss(factor * module.total, {f"mtp_loss_{number}": module.metrics["loss"]})
            for number, module in enumerate(others, 1)
        ]
        return Loss(main.total, main.metrics, modules)
