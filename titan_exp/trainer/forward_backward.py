"""Forward and backward passes of a global batch, for a model without a pipeline, and their capture as CUDA graphs."""

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from titan_exp.config.errors.user_error import UserError
from titan_exp.data.batch import MicroBatch
from titan_exp.parallel.compute_weights import ComputeWeights
from titan_exp.parallel.context_parallel.apply import gather_sequence
from titan_exp.parallel.fsdp import set_gradient_sync
from titan_exp.parallel.mesh import Mesh
from titan_exp.parallel.pipeline_runtime import Pipeline
from titan_exp.parallel.pipeline_stage import Stage
from titan_exp.parallel.step_observer import step_observer
from titan_exp.tracking.logging import get_logger
from titan_exp.trainer.experts import ExpertLoad
from titan_exp.trainer.objective import MetricSums, Objective, loss_divisors, normalize_by_tokens


def shard_batch(batch: MicroBatch, mesh: Mesh) -> MicroBatch:
    """Move a CPU batch of whole rows to the device and take this rank's tokens. Positions are explicit under context or
    pipeline parallelism: a token's index in the shard is not its position."""
    whole = batch.to(mesh.device)
    if mesh.sequence_shard.degree == 1 and mesh.pp_group is None:
        return whole
    return whole.sharded(mesh.sequence_shard)


class Model(ABC):
    """A parallel model with its objective, as `train_step` and evaluation use it. `weights` are copies of parameters in
    the compute dtype; `parts` are this rank's modules, one per pipeline stage, with full names."""

    eval_microbatches = 1  # micro-batches per call of `loss_sum` for the fastest evaluation
    load: ExpertLoad | None = None  # tokens per expert; update it after every optimizer step

    def __init__(
        self, parts: Sequence[nn.Module], objective: Objective, mesh: Mesh, weights: ComputeWeights | None = None
    ) -> None:
        self.parts, self.objective, self.weights = parts, objective, weights or ComputeWeights()
        self._mesh = mesh
        self._parameters = [parameter for part in parts for parameter in part.parameters()]
        self._unique_parameters = self._parameters

    @abstractmethod
    def forward_backward(self, batches: Sequence[MicroBatch], tokens: Sequence[int]) -> Mapping[str, Tensor]:
        """Compute the gradients of a global batch from this rank's CPU micro-batches. `tokens` are as of
        `token_counts`. Returns this rank's share of the loss and of the objective's metrics."""

    @abstractmethod
    def loss_sum(self, batches: Sequence[MicroBatch]) -> Tensor:
        """This rank's share of the summed loss of any number of micro-batches, fp64, without gradients."""

    @abstractmethod
    def outputs(self, batch: MicroBatch) -> Tensor:
        """Outputs [rows, tokens, ...] of whole rows in fp32 on every rank, without gradients; all ranks must call it
        with the same batch, whose tensors have a row for each sequence."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters on this rank: the master copies of the compute weights."""
        return iter(self._parameters)

    def unique_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters on this rank, without copies of weights tied to another stage."""
        return iter(self._unique_parameters)


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
        return _call(module, batch, hidden).float()
    return gather_sequence(_call(module, shard_batch(batch, mesh), hidden).float(), mesh)


def _call(module: nn.Module, batch: MicroBatch, hidden: Tensor | None) -> Tensor:
    inputs = batch.inputs(hidden)
    return module(*inputs.positional, **inputs.named)


class EagerModel(Model):
    """A model without a pipeline: every rank computes all layers."""

    def __init__(
        self, module: nn.Module, objective: Objective, mesh: Mesh, weights: ComputeWeights | None = None
    ) -> None:
        super().__init__([module], objective, mesh, weights)
        self._module = module

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
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        with self.weights.in_use():
            for batch in batches:
                total += self.objective(self._module, shard_batch(batch, self._mesh)).metrics["loss"]
        return total

    @torch.no_grad()
    def outputs(self, batch: MicroBatch) -> Tensor:
        with self.weights.in_use():
            return whole_outputs(self._module, batch, self._mesh)


class PipelineModel(Model):
    """Pipeline stages behind the `Model` interface. Losses and metrics are 0 on ranks without the last stage."""

    def __init__(self, pipeline: Pipeline, objective: Objective, mesh: Mesh, weights: ComputeWeights) -> None:
        super().__init__([stage.module for stage in pipeline.stages], objective, mesh, weights)
        self.eval_microbatches = pipeline.microbatches
        self._pipeline, self._rows = pipeline, pipeline.transport.rows
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
                return _call(stage.module, batch, hidden)
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
                return _call(stage.module, batch, hidden)
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
            return _call(stage.module, shard_batch(part, self._mesh), hidden)

        with self.weights.in_use():
            self._pipeline.forward_only(passes, compute)
        return self._pipeline.from_last_stage(torch.cat(whole)[:count] if whole else None)


@dataclass(frozen=True)
class Recording:
    """Work captured by a recorder."""

    replay: Callable[[], None]  # run the same kernels on the same addresses; Python numbers keep their captured values
    description: str


class Recorder(Protocol):
    """Captures a function without arguments that neither synchronizes the device nor reads host memory."""

    def warmup(self, work: Callable[[], None]) -> None:
        """Run the work once, under the conditions of the capture."""

    def record(self, work: Callable[[], None]) -> Recording:
        """Capture the work and run it once."""
        ...


class CudaRecorder:
    """Captures into a CUDA graph with its own memory pool. Not yet run on a GPU. Warm-up and capture share one side
    stream, as torch requires: autograd nodes synchronize with the stream on which they were created."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def warmup(self, work: Callable[[], None]) -> None:
        """Run the work on the capture stream, synchronized with the current stream before and after."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)

    def record(self, work: Callable[[], None]) -> Recording:
        """Capture, then replay, because capturing executes nothing. Raises RuntimeError if CUDA cannot capture the
        work; a note names the option to switch off."""
        # The trainer disables automatic collection; garbage would keep memory out of the graph's pool.
        gc.collect()
        graph = torch.cuda.CUDAGraph()
        try:
            # Threads that pin batches or save checkpoints may allocate during the capture.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                work()
        except RuntimeError as error:
            error.add_note("A CUDA graph was capturing this pass. To train without it, use compile.cuda_graphs=false.")
            raise
        graph.replay()
        pool, segments = tuple(graph.pool()), torch.cuda.memory_snapshot()
        size = sum(each["total_size"] for each in segments if tuple(each.get("segment_pool_id", ())) == pool)
        return Recording(graph.replay, f"a CUDA graph with a memory pool of {size / 2**20:,.1f} MiB")


WARMUP_STEPS = 3  # eager passes before the captured one; compilation, autotuning and library setup happen in them


class GraphedModel(EagerModel):
    """A model on one rank whose forward and backward pass is a CUDA graph. Compute weights accumulate gradients in
    `fixed` buffers. Evaluation and micro-batches of other shapes run eagerly."""

    def __init__(
        self, module: nn.Module, objective: Objective, mesh: Mesh, weights: ComputeWeights, recorder: Recorder
    ) -> None:
        super().__init__(module, objective, mesh, weights)
        self._recorder = recorder
        self._tokens, self._sums = list[Tensor](), MetricSums(objective, mesh.device)
        self._inputs: MicroBatch | None = None
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._warmup_passes = 0
        self._recording: Recording | None = None
        self._addresses: list[int] = []

    def forward_backward(self, batches: Sequence[MicroBatch], tokens: Sequence[int]) -> Mapping[str, Tensor]:
        """Run micro-batches in order, once captured as replays. Raises UserError if weights have moved."""
        with self.weights.training():
            self._restore_gradients()
            if self._recording is not None and self._current_addresses() != self._addresses:
                raise UserError(
                    "compile.cuda_graphs=true needs weights at fixed addresses, and the optimizer replaced them "
                    "instead of updating them in place. Use compile.cuda_graphs=false with this optimizer."
                )
            divisors = loss_divisors(tokens, self._mesh.device)
            self._tokens = self._tokens or divisors
            for own, divisor in zip(self._tokens, divisors, strict=True):
                own.copy_(divisor)
            self._sums.reset()
            for batch in batches:
                self._one_pass(batch)
        # Replays of the next step overwrite the originals.
        return {name: value.clone() for name, value in self._sums.values.items()}

    def _one_pass(self, batch: MicroBatch) -> None:
        if self._inputs is None:
            self._inputs = batch.map(lambda tensor: tensor.to(self._mesh.device, copy=True))
        inputs = self._inputs
        if not _same_shape(inputs, batch):
            other = batch.to(self._mesh.device)
            self._recorder.warmup(lambda: self._compute(other))
            return
        for target, source in zip(inputs.tensors, batch.tensors, strict=True):
            target.copy_(source, non_blocking=True)
        if self._recording is not None:
            self._recording.replay()
        elif self._warmup_passes < WARMUP_STEPS:
            self._recorder.warmup(lambda: self._compute(inputs))
            self._warmup_passes += 1
            # Those that the pass computes with, which may be copies.
            used = self._module.parameters()
            self._gradients = [(weight, weight.grad) for weight in used if weight.grad is not None]
        else:
            self._addresses = self._current_addresses()
            self._recording = self._recorder.record(lambda: self._compute(inputs))
            first, *_ = inputs.inputs().positional
            assert first is not None
            text = "compile.cuda_graphs: captured the pass of %d × %d tokens after %d warm-up passes: %s"
            get_logger().info(text, *first.shape[:2], WARMUP_STEPS, self._recording.description)

    def _compute(self, inputs: MicroBatch) -> None:
        """Captured work: accumulates gradients and metrics in their buffers."""
        loss, metrics = normalize_by_tokens(self.objective, self._module, inputs, self._tokens)
        loss.backward()
        self._sums.add(metrics)

    def _restore_gradients(self) -> None:
        """Reattach the gradient buffers that the last step has detached, and zero them."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        if self._gradients:
            torch._foreach_zero_([gradient for _, gradient in self._gradients])

    def _current_addresses(self) -> list[int]:
        tensors = (*self._module.parameters(), *self._module.buffers())
        return [tensor.data_ptr() for tensor in tensors if not isinstance(tensor, FakeTensor)]


def _same_shape(first: MicroBatch, second: MicroBatch) -> bool:
    given = ((*batch.inputs().positional, *batch.inputs().named.values()) for batch in (first, second))
    shapes = [[None if tensor is None else tensor.shape for tensor in tensors] for tensors in given]
    return shapes[0] == shapes[1]
