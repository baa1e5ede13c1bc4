"""Forward and backward passes of a global batch, for a model without a pipeline."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from titan_exp.data.batch import MicroBatch
from titan_exp.parallel.compute_weights import ComputeWeights
from titan_exp.parallel.context_parallel.apply import gather_sequence
from titan_exp.parallel.fsdp import set_gradient_sync
from titan_exp.parallel.mesh import Mesh
from titan_exp.parallel.pipeline_runtime import Pipeline
from titan_exp.parallel.pipeline_stage import Stage
from titan_exp.parallel.step_observer import step_observer
from titan_exp.trainer.experts import ExpertLoad
from titan_exp.trainer.objective import MetricSums, Objective, loss_divisors, normalize_by_tokens


def shard_batch(batch: MicroBatch, mesh: Mesh) -> MicroBatch:
    """Move a CPU batch of whole rows to the device and take this rank's tokens.

    Positions are explicit under context or pipeline parallelism: a token's index in the shard is not its position.
    """
    whole = batch.to(mesh.device)
    if mesh.sequence_shard.degree == 1 and mesh.pp_group is None:
        return whole
    return whole.sharded(mesh.sequence_shard)


@runtime_checkable
class Model(Protocol):
    """A parallel model with its objective, as `train_step` and evaluation use it."""

    objective: Objective
    """Computes the loss of a micro-batch."""
    weights: ComputeWeights
    """Copies of the parameters in the compute dtype; refresh them after every change of the parameters."""
    load: ExpertLoad | None
    """Tokens per expert; update it after every optimizer step."""

    @property
    def parts(self) -> Sequence[nn.Module]:
        """Modules on this rank, one per pipeline stage; parameters keep their names in the whole model."""
        ...

    @property
    def eval_microbatches(self) -> int:
        """Micro-batches per call of `loss_sum` for the fastest evaluation."""
        ...

    def forward_backward(self, batches: Sequence[MicroBatch], tokens: Sequence[int]) -> Mapping[str, Tensor]:
        """Compute the gradients of a global batch from this rank's CPU micro-batches.

        `tokens` are the predicted tokens of the global batch, then those of each further prediction (`token_counts`).

        Returns this rank's share of the loss and of the objective's metrics.
        """
        ...

    def loss_sum(self, batches: Sequence[MicroBatch]) -> Tensor:
        """This rank's share of the summed loss of any number of micro-batches, fp64, without gradients."""
        ...

    def outputs(self, batch: MicroBatch) -> Tensor:
        """Outputs [rows, tokens, ...] of whole rows in fp32 on every rank, without gradients; all ranks must call it
        with the same batch, whose tensors have a row for each sequence."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters on this rank: the master copies of the compute weights."""
        ...

    def unique_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters on this rank, without copies of weights tied to another stage."""
        ...


@contextmanager
def evaluating(model: Model) -> Iterator[None]:
    """Modules in evaluation mode and no gradients, in the `with` block."""
    for part in model.parts:
        part.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part in model.parts:
            part.train()


def whole_outputs(
    module: nn.Module, batch: MicroBatch, mesh: Mesh | None, hidden: Tensor | None = None
) -> Float[Tensor, "rows tokens width"]:
    """Outputs of a model, or of its last pipeline stage from `hidden` states, for whole sequences in fp32; `mesh` is
    None on one device. All ranks that share the sequences must call it."""
    if mesh is None:
        inputs = batch.inputs(hidden)
        return module(*inputs.positional, **inputs.named).float()
    inputs = shard_batch(batch, mesh).inputs(hidden)
    return gather_sequence(module(*inputs.positional, **inputs.named).float(), mesh)


class EagerModel:
    """A model without a pipeline: every rank computes all layers."""

    eval_microbatches = 1
    load: ExpertLoad | None = None

    def __init__(
        self, module: nn.Module, objective: Objective, mesh: Mesh, weights: ComputeWeights | None = None
    ) -> None:
        self.parts, self.objective, self.weights = [module], objective, weights or ComputeWeights()
        self._module, self._mesh = module, mesh
        self._parameters = list(module.parameters())

    def forward_backward(self, batches: Sequence[MicroBatch], tokens: Sequence[int]) -> Mapping[str, Tensor]:
        """Run micro-batches in order; the last backward pass reduces gradients over ranks."""
        sums, divisors = MetricSums(self.objective, self._mesh.device), loss_divisors(tokens, self._mesh.device)
        with self.weights.training():
            for index, batch in enumerate(batches):
                step_observer().microbatch_begin(index)
                set_gradient_sync(self._module, last=index == len(batches) - 1)
                # The batch on the device has no name here, so that backward frees what it has read.
                loss, metrics = normalize_by_tokens(
                    self.objective, self._module, shard_batch(batch, self._mesh), divisors
                )
                loss.backward()
                sums.add(metrics)
        return sums.values

    def loss_sum(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Run micro-batches forward in order."""
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        with self.weights.in_use():
            for batch in batches:
                total += self.objective(self._module, shard_batch(batch, self._mesh)).metrics["loss"]
        return total

    @torch.no_grad()
    def outputs(self, batch: MicroBatch) -> Tensor:
        """Run one micro-batch of any number of rows."""
        with self.weights.in_use():
            return whole_outputs(self._module, batch, self._mesh)

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters."""
        return iter(self._parameters)

    unique_parameters = parameters


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
        """Run the pipeline schedule once per pass of micro-batches; gradients are reduced once."""
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
        """Run micro-batches of as many rows as in training; the last is padded with copies of its last row."""
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
        """Parameters of this rank's stages, without copies of the first stage's tied weights."""
        return iter(self._unique_parameters)
