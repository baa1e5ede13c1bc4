"""What a training step asks of a model, whether one rank computes all of it or it is spread over a pipeline."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from titan_exp.data.batch import Batch
from titan_exp.parallel.fsdp.apply import set_gradient_sync
from titan_exp.parallel.mesh import Mesh
from titan_exp.parallel.step_observer import step_observer
from titan_exp.trainer.batch_placement import shard_batch
from titan_exp.trainer.loss import TokenLoss


class Model(Protocol):
    """A parallel model as the algorithm sees it."""

    @property
    def parts(self) -> Sequence[nn.Module]:
        """Its parts on this rank, whose parameters have their names in the whole model."""
        ...

    @property
    def eval_microbatches(self) -> int:
        """How many micro-batches at once evaluation is quickest with."""
        ...

    def forward_backward(self, batches: Sequence[Batch], tokens: int) -> Tensor:
        """Leave the gradients of a global batch of `tokens` predicted tokens, of which `batches` are this rank's
        micro-batches, on the CPU. Returns this rank's share of the mean cross-entropy."""
        ...

    def cross_entropy(self, batches: Sequence[Batch]) -> Tensor:
        """This rank's share of the summed cross-entropy, fp64, without gradients; any number of micro-batches."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters on this rank."""
        ...

    def unique_parameters(self) -> Iterator[nn.Parameter]:
        """Those of them that no other part of the model counts in a sum over all."""
        ...


class EagerModel:
    """A model of which every rank computes all layers."""

    eval_microbatches = 1

    def __init__(self, module: nn.Module, token_loss: TokenLoss, mesh: Mesh) -> None:
        self.parts = [module]
        self._module, self._token_loss, self._mesh = module, token_loss, mesh

    def forward_backward(self, batches: Sequence[Batch], tokens: int) -> Tensor:
        """Micro-batches one after the other; the last backward pass reduces gradients over ranks."""
        loss, divisor = torch.zeros((), device=self._mesh.device), predicted(tokens, self._mesh.device)
        for index, batch in enumerate(batches):
            step_observer().microbatch_begin(index)
            set_gradient_sync(self._module, last=index == len(batches) - 1)
            objective, cross_entropy = normalize_by_tokens(
                self._token_loss, self._module, shard_batch(batch, self._mesh), divisor
            )
            objective.backward()
            loss += cross_entropy
        return loss

    def cross_entropy(self, batches: Sequence[Batch]) -> Tensor:
        """Summed over the micro-batches, one after the other."""
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for batch in batches:
            total += self._token_loss(self._module, shard_batch(batch, self._mesh)).cross_entropy
        return total

    def parameters(self) -> Iterator[nn.Parameter]:
        """All of them."""
        return self._module.parameters()

    unique_parameters = parameters


def normalize_by_tokens(
    token_loss: TokenLoss, module: nn.Module, batch: Batch, tokens: Tensor, hidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A micro-batch's share of the objective and of the cross-entropy (detached), as means over the global batch.

    Dividing by the tokens of the whole global batch here makes every sum of gradients, over micro-batches and over
    ranks, the gradient of the global mean, however tokens are spread. `tokens` is what `predicted` makes of them.
    """
    objective, cross_entropy = token_loss(module, batch, hidden)
    return objective / tokens, cross_entropy / tokens


def predicted(tokens: int, device: torch.device) -> Tensor:
    """What losses are divided by: the number of predicted tokens, at least 1, an fp32 scalar on the device.

    A number of Python's is multiplied by as its rounded inverse on CUDA, and would be frozen in a recorded pass.
    """
    return torch.full((), max(tokens, 1), dtype=torch.float32, device=device)
