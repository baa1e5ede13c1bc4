"""CUDA-graphed model: forward and backward of a micro-batch, captured once and then replayed.

Avoids kernel launches, which dominate small models. Everything that varies between micro-batches is at fixed addresses:
tokens and labels, token count, loss and gradients, which are zeroed instead of dropped.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from titan_exp.config.errors.user_error import UserError
from titan_exp.data.batch import MicroBatch
from titan_exp.parallel.compute_weights import ComputeWeights
from titan_exp.parallel.mesh import Mesh
from titan_exp.tracking.logging import get_logger
from titan_exp.trainer.cuda_graphs.capture import Recorder, Recording
from titan_exp.trainer.forward_backward import EagerModel
from titan_exp.trainer.objective.base import MetricSums, Objective, loss_divisors, normalize_by_tokens

WARMUP_STEPS = 3
"""Passes before the captured one, in which compilation, autotuning and library setup happen."""


class GraphedModel(EagerModel):
    """A model on one rank with plain tensors as parameters; compute weights keep their sums of gradients `fixed`.

    Micro-batches of another shape than the first, and evaluation, run without the graph.
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
        """Run micro-batches in order, each a replay once a pass has been captured.

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
            self._gradients = [(weight, weight.grad) for weight in self.parameters() if weight.grad is not None]
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
        """Captured work: accumulate gradients and metrics in their buffers."""
        loss, metrics = normalize_by_tokens(self.objective, self._module, inputs, self._tokens)
        loss.backward()
        self._sums.add(metrics)

    def _restore_gradients(self) -> None:
        """Attach the gradient buffers again, which the last step has detached, and zero them."""
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
        tensors = (*self.parameters(), *self._module.buffers())
        return [tensor.data_ptr() for tensor in tensors if not isinstance(tensor, FakeTensor)]


def _same_shape(first: MicroBatch, second: MicroBatch) -> bool:
    given = ((*batch.inputs().positional, *batch.inputs().named.values()) for batch in (first, second))
    shapes = [[None if tensor is None else tensor.shape for tensor in tensors] for tensors in given]
    return shapes[0] == shapes[1]
