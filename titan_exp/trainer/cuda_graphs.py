"""CUDA graphs: captures a function, and wraps a model so that its passes are captured."""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from titan_exp.config.errors.user_error import UserError
from titan_exp.data.batch import MicroBatch
from titan_exp.parallel.compute_weights import ComputeWeights
from titan_exp.parallel.mesh import Mesh
from titan_exp.tracking.logging import get_logger
from titan_exp.trainer.forward_backward import EagerModel
from titan_exp.trainer.objective import MetricSums, Objective, loss_divisors, normalize_by_tokens


@dataclass(frozen=True)
class Recording:
    """Work captured by a recorder."""

    replay: Callable[[], None]
    """Run the same kernels on the same addresses. Python code does not run, so Python numbers keep their captured
    values."""
    description: str
    """Kind and memory of the graph, for the log."""


class Recorder(Protocol):
    """Captures a function without arguments that neither synchronizes the device nor reads host memory."""

    def warmup(self, work: Callable[[], None]) -> None:
        """Run the work once, under the conditions of the capture."""
        ...

    def record(self, work: Callable[[], None]) -> Recording:
        """Capture the work and run it once."""
        ...


class CudaRecorder:
    """Captures into a CUDA graph with its own memory pool. Not yet run on a GPU.

    Warm-up and capture share one side stream, as torch requires: autograd nodes synchronize with the stream on which
    they were created.
    """

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
        """Capture, then replay, because capturing executes nothing.

        Raises:
            RuntimeError: CUDA cannot capture the work; a note names the option to switch off.
        """
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
        return Recording(graph.replay, f"a CUDA graph with a memory pool of {_pool_bytes(graph) / 2**20:,.1f} MiB")


def _pool_bytes(graph: torch.cuda.CUDAGraph) -> int:
    """Bytes in the graph's own memory pool."""
    pool = tuple(graph.pool())
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment.get("segment_pool_id", ())) == pool)


WARMUP_STEPS = 3
"""Eager passes before the captured one; compilation, autotuning and library setup happen in them."""


class GraphedModel(EagerModel):
    """A model on one rank whose forward and backward pass is a CUDA graph. Parameters are plain tensors, and compute
    weights accumulate gradients in `fixed` buffers.

    Evaluation, and micro-batches of another shape than the first, run without the graph.
    """

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
        """Run micro-batches in order; once a pass has been captured, each is a replay.

        Raises:
            UserError: the optimizer has moved weights to other addresses.
        """
        with self.weights.training():
            self._restore_gradients()
            self._require_same_addresses()
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
            rows, length = first.shape[:2]
            get_logger().info(
                "compile.cuda_graphs: captured the pass of %d × %d tokens after %d warm-up passes: %s",
                *(rows, length, WARMUP_STEPS, self._recording.description),
            )

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

    def _require_same_addresses(self) -> None:
        if self._recording is not None and self._current_addresses() != self._addresses:
            raise UserError(
                "compile.cuda_graphs=true needs weights at fixed addresses, and the optimizer replaced them instead of "
                "updating them in place. Use compile.cuda_graphs=false with this optimizer."
            )

    def _current_addresses(self) -> list[int]:
        tensors = (*self._module.parameters(), *self._module.buffers())
        return [tensor.data_ptr() for tensor in tensors if not isinstance(tensor, FakeTensor)]


def _same_shape(first: MicroBatch, second: MicroBatch) -> bool:
    given = ((*batch.inputs().positional, *batch.inputs().named.values()) for batch in (first, second))
    shapes = [[None if tensor is None else tensor.shape for tensor in tensors] for tensors in given]
    return shapes[0] == shapes[1]
