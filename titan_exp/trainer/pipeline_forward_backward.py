"""Forward and backward passes of a global batch through the pipeline stages of this rank."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from titan_exp.data.batch import MicroBatch
from titan_exp.parallel.compute_weights import ComputeWeights
from titan_exp.parallel.mesh import Mesh
from titan_exp.parallel.pipeline_parallel.runtime import Pipeline
from titan_exp.parallel.pipeline_parallel.stage import Stage
from titan_exp.trainer.experts import ExpertLoad
from titan_exp.trainer.forward_backward import shard_batch, whole_outputs
from titan_exp.trainer.objective import MetricSums, Objective, loss_divisors, normalize_by_tokens


class PipelineModel:
    """Pipeline stages behind the `Model` interface. Losses and metrics are 0 on ranks without the last stage."""

    load: ExpertLoad | None = None

    def __init__(self, pipeline: Pipeline, objective: Objective, mesh: Mesh, weights: ComputeWeights) -> None:
        self.parts, self.objective, self.weights = [stage.module for stage in pipeline.stages], objective, weights
        self.eval_microbatches = pipeline.microbatches
        self._pipeline, self._mesh, self._rows = pipeline, mesh, pipeline.transport.rows
        self._parameters = [parameter for part in self.parts for parameter in part.parameters()]
        self._unique_parameters = [
            parameter
            for stage in pipeline.stages
            for name, parameter in stage.module.named_parameters()
            if name not in stage.copied
        ]

    def forward_backward(self, batches: Sequence[MicroBatch], tokens: Sequence[int]) -> Mapping[str, Tensor]:
        """Run a schedule once per pass of micro-batches; gradients are reduced once."""
        sums, size = MetricSums(self.objective, self._mesh.device), self._pipeline.pass_size(len(batches))
        assert len(batches) % size == 0, "checked by the rules"

        def compute(first: int, stage: Stage, microbatch: int, hidden: Tensor | None) -> Tensor:
            batch = shard_batch(batches[first + microbatch], self._mesh)
            if not stage.last:
                inputs = batch.inputs(hidden)
                return stage.module(*inputs.positional, **inputs.named)
            divisors = loss_divisors(tokens, self._mesh.device)
            loss, metrics = normalize_by_tokens(self.objective, stage.module, batch, divisors, hidden)
            sums.add(metrics)
            return loss

        with self.weights.training():
            self._pipeline.train((partial(compute, first) for first in range(0, len(batches), size)), size)
        self._pipeline.sum_tied_gradients()
        return sums.values

    def loss_sum(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Run all micro-batches forward in one pass."""
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)

        def compute(stage: Stage, microbatch: int, hidden: Tensor | None) -> Tensor:
            batch = shard_batch(batches[microbatch], self._mesh)
            if not stage.last:
                inputs = batch.inputs(hidden)
                return stage.module(*inputs.positional, **inputs.named)
            loss = self.objective(stage.module, batch, hidden).metrics["loss"]
            total.add_(loss)
            return loss

        with self.weights.in_use():
            self._pipeline.forward_only(len(batches), compute)
        return total

    @torch.no_grad()
    def outputs(self, batch: MicroBatch) -> Tensor:
        """Run micro-batches of as many rows as training has, the last one filled up with its last row."""
        count = len(batch.tensors[0])
        passes = -(-count // self._rows)
        rows = torch.arange(passes * self._rows, device=batch.tensors[0].device).clamp(max=count - 1)
        whole: list[Tensor] = []

        def compute(stage: Stage, microbatch: int, hidden: Tensor | None) -> Tensor:
            chosen = rows[microbatch * self._rows : (microbatch + 1) * self._rows]
            part = batch.map(lambda tensor: tensor[chosen])
            if stage.last:
                whole.append(whole_outputs(stage.module, part, self._mesh, hidden))
                return whole[-1]
            inputs = shard_batch(part, self._mesh).inputs(hidden)
            return stage.module(*inputs.positional, **inputs.named)

        with self.weights.in_use():
            self._pipeline.forward_only(passes, compute)
        return self._pipeline.from_last_stage(torch.cat(whole)[:count] if whole else None)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of this rank's stages."""
        return iter(self._parameters)

    def unique_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of this rank's stages without copies of the first stage's tied weights."""
        return iter(self._unique_parameters)
