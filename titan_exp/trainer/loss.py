"""The loss of a batch, whole logits at once or a chunk of tokens at a time; training and evaluation share it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from titan_exp.config.groups.activation_checkpoint import CompileConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.data.batch import Batch
from titan_exp.ops.loss.cross_entropy import LossSum, loss_sum
from titan_exp.ops.loss.linear_cross_entropy import ChunkLoss, chunk_loss, linear_loss_sum
from titan_exp.ops.loss.vocab_parallel import VocabShard


@dataclass(frozen=True)
class TokenLoss:
    """Cross-entropy, plus z-loss where it has a coefficient, summed over the tokens of a batch."""

    chunk_tokens: int | None = None
    """Tokens whose logits are held at a time; None holds all of them."""
    z_loss: float = 0.0
    """Coefficient of log(Z)²."""
    part: VocabShard | None = None
    """The words whose logits this rank computes, where they are divided among ranks."""
    whole: Callable[..., LossSum] = loss_sum
    """What makes a loss of all logits; `loss_sum`, or that compiled."""
    of_chunk: Callable[..., ChunkLoss] = chunk_loss
    """What makes a loss, and a gradient, of a chunk's logits; `chunk_loss`, or that compiled."""

    @staticmethod
    def of(config: TrainingConfig, compile_: CompileConfig, part: VocabShard | None = None) -> "TokenLoss":
        """The loss that a configuration says, on a rank with this part of the vocabulary."""
        loss = TokenLoss(config.loss_chunk_tokens, config.z_loss, part)
        return loss.compiled(compile_.backend) if compile_.compiles("loss") else loss

    def compiled(self, backend: str) -> "TokenLoss":
        """The same, by code generated for each shape that comes: that of a whole chunk and that of the last one.

        Shapes are fixed: a graph for any shape would be found for the whole chunks as well, and serve them slower.
        """
        compile_ = partial(torch.compile, backend=backend, fullgraph=True, dynamic=False)
        return replace(self, whole=compile_(self.whole), of_chunk=compile_(self.of_chunk))

    def __call__(self, model: nn.Module, batch: Batch, hidden: Tensor | None = None) -> LossSum:
        """Run the model, or its last stage over the `hidden` states of the stage before, over a batch on its device.

        In chunks the loss is computed inside the model's forward, where sharding has gathered the head's weight.
        """
        inputs = (batch.tokens if hidden is None else hidden, batch.positions, batch.documents)
        if self.chunk_tokens is None:
            return self.whole(model(*inputs), batch.labels, self.z_loss, self.part)
        loss = partial(
            linear_loss_sum,
            labels=batch.labels,
            chunk_tokens=self.chunk_tokens,
            z_loss=self.z_loss,
            part=self.part,
            of_chunk=self.of_chunk,
        )
        return model(*inputs, loss=loss)
