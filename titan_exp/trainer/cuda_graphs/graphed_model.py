"""A model whose passes, forward and backward of a micro-batch, are recorded once and then replayed.

Small models spend their time launching kernels. What varies between micro-batches lies at fixed addresses: tokens and
labels, the number of predicted tokens, the loss, and gradients, which are therefore zeroed and not dropped.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from titan_exp.config.errors.user_error import UserError
from titan_exp.data.batch import Batch
from titan_exp.parallel.fsdp.single_rank_precision import SingleRankPrecision
from titan_exp.parallel.mesh import Mesh
from titan_exp.tracking.logging import get_logger
from titan_exp.trainer.cuda_graphs.capture import Recorder, Recording
from titan_exp.trainer.forward_backward import EagerModel
from titan_exp.trainer.objective.base import MetricSums, Objective, normalize_by_tokens, token_count

WARMUP_STEPS = 3
"""Passes before the one that is recorded: compilation, tuning and libraries' set-up happen in them."""


class GraphedModel(EagerModel):
    """A model on one rank, its parameters plain tensors.

    Micro-batches of another shape than the first one's are computed without the recording, and so is evaluation.

    Args:
        module: what computes; the same for every micro-batch of a shape, whatever the values.
        objective: computes the loss.
        mesh: of one rank.
        recorder: of its device.
        dtype: what it computes in.
    """

    def __init__(
        self, module: nn.Module, objective: Objective, mesh: Mesh, recorder: Recorder, *, dtype: torch.dtype
    ) -> None:
        super().__init__(module, objective, mesh)
        self._recorder, self._weights = recorder, SingleRankPrecision(module, dtype)
        self._tokens, self._sums = token_count(1, mesh.device), MetricSums(objective, mesh.device)
        self._inputs: Batch | None = None
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._warmup_passes = 0
        self._recording: Recording | None = None
        self._addresses: list[int] = []

    def forward_backward(self, batches: Sequence[Batch], tokens: int) -> Mapping[str, Tensor]:
        """Micro-batches one after the other, each a replay once there is a recording.

        Raises:
            UserError: weights are no longer where they were recorded.
        """
        self._take_gradients_back()
        self._require_same_places()
        self._tokens.copy_(token_count(tokens, self._mesh.device))
        self._sums.reset()
        for batch in batches:
            self._one_pass(batch)
        # The next step's replays write to the same address.
        return {name: value.clone() for name, value in self._sums.values.items()}

    def loss_sum(self, batches: Sequence[Batch]) -> Tensor:
        """Summed over the micro-batches, one after the other, none of them replayed."""
        with self._weights.in_use():
            return super().loss_sum(batches)

    def _one_pass(self, batch: Batch) -> None:
        if self._inputs is None:
            self._inputs = batch.map(lambda tensor: tensor.to(self._mesh.device, copy=True))
        inputs = self._inputs
        if not _alike(inputs, batch):
            other = batch.to(self._mesh.device)
            self._recorder.warmup(lambda: self._compute(other))
            return
        for target, source in zip(_tensors(inputs), _tensors(batch), strict=True):
            target.copy_(source, non_blocking=True)
        if self._recording is not None:
            self._recording.replay()
        elif self._warmup_passes < WARMUP_STEPS:
            self._recorder.warmup(lambda: self._compute(inputs))
            self._warmup_passes += 1
            self._gradients = [(it, it.grad) for it in self.parameters() if it.grad is not None]
        else:
            self._addresses = self._places()
            self._recording = self._recorder.record(lambda: self._compute(inputs))
            rows, length = inputs.tokens.shape
            get_logger().info(
                "compile.cuda_graphs: after %d passes of %d × %d tokens, what follows replays the next one, %s",
                *(WARMUP_STEPS, rows, length, self._recording.description),
            )

    def _compute(self, inputs: Batch) -> None:
        """Recorded work: adds gradients and loss to the buffers."""
        with self._weights.in_use():
            loss, metrics = normalize_by_tokens(self.objective, self._module, inputs, self._tokens)
            loss.backward()
        self._sums.add(metrics)

    def _take_gradients_back(self) -> None:
        """The optimizer has dropped gradients; their memory is kept here."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        if self._gradients:
            torch._foreach_zero_([gradient for _, gradient in self._gradients])

    def _require_same_places(self) -> None:
        if self._recording is not None and self._places() != self._addresses:
            raise UserError(
                "compile.cuda_graphs=true replays what is done to weights where they were, and the optimizer has put "
                "them elsewhere instead of changing them in place; compile.cuda_graphs=false trains with it."
            )

    def _places(self) -> list[int]:
        return [tensor.data_ptr() for tensor in (*self.parameters(), *self._module.buffers())]


def _tensors(batch: Batch) -> Iterator[Tensor]:
    yield from (it for it in (batch.tokens, batch.labels, batch.positions, batch.documents) if it is not None)


def _alike(one: Batch, other: Batch) -> bool:
    given = [(it.positions is None, it.documents is None) for it in (one, other)]
    return given[0] == given[1] and one.tokens.shape == other.tokens.shape
