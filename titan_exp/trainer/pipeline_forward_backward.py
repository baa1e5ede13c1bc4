"""A model of which this rank has some pipeline stages: micro-batches pass through all of them, rank by rank."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from titan_exp.data.batch import Batch
from titan_exp.parallel.mesh import Mesh
from titan_exp.parallel.pipeline_parallel.runtime import Pipeline
from titan_exp.parallel.pipeline_parallel.stage import Stage
from titan_exp.trainer.batch_placement import shard_batch
from titan_exp.trainer.forward_backward import normalize_by_tokens, predicted
from titan_exp.trainer.loss import TokenLoss


class PipelineModel:
    """Stages behind the interface of `trainer.model.Model`; only the rank of the last one has a loss that is not 0."""

    def __init__(self, pipeline: Pipeline, token_loss: TokenLoss, mesh: Mesh) -> None:
        self.parts = [stage.module for stage in pipeline.stages]
        self.eval_microbatches = pipeline.microbatches
        self._pipeline, self._token_loss, self._mesh = pipeline, token_loss, mesh

    def forward_backward(self, batches: Sequence[Batch], tokens: int) -> Tensor:
        """As many passes through the pipeline as there are micro-batches for; gradients are reduced once."""
        loss = torch.zeros((), device=self._mesh.device)
        size = self._pipeline.microbatches
        assert len(batches) % size == 0, "checked by the rules"

        def compute(first: int, stage: Stage, microbatch: int, hidden: Tensor | None) -> Tensor:
            batch = shard_batch(batches[first + microbatch], self._mesh)
            if not stage.last:
                return stage.module(batch.tokens if hidden is None else hidden, batch.positions, batch.documents)
            divisor = predicted(tokens, self._mesh.device)
            objective, cross_entropy = normalize_by_tokens(self._token_loss, stage.module, batch, divisor, hidden)
            loss.add_(cross_entropy)
            return objective

        self._pipeline.train(partial(compute, first) for first in range(0, len(batches), size))
        return loss

    def cross_entropy(self, batches: Sequence[Batch]) -> Tensor:
        """All micro-batches in one pass forward."""
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)

        def compute(stage: Stage, microbatch: int, hidden: Tensor | None) -> Tensor:
            batch = shard_batch(batches[microbatch], self._mesh)
            if not stage.last:
                return stage.module(batch.tokens if hidden is None else hidden, batch.positions, batch.documents)
            cross_entropy = self._token_loss(stage.module, batch, hidden).cross_entropy
            total.add_(cross_entropy)
            return cross_entropy

        self._pipeline.forward_only(len(batches), compute)
        return total

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of this rank's stages."""
        for part in self.parts:
            yield from part.parameters()

    def unique_parameters(self) -> Iterator[nn.Parameter]:
        """Less those that are copies of the first stage's."""
        for stage in self._pipeline.stages:
            yield from (parameter for name, parameter in stage.module.named_parameters() if name not in stage.copied)
