"""The loss of a batch, whole logits at once or a chunk of tokens at a time; training and evaluation share it."""

from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from titan_exp.config.training import TrainingConfig
from titan_exp.data.batch import Batch
from titan_exp.ops.cross_entropy import LossSum, loss_sum
from titan_exp.ops.linear_cross_entropy import linear_loss_sum
from titan_exp.ops.vocabulary import VocabularyPart


@dataclass(frozen=True)
class TokenLoss:
    """Cross-entropy, plus z-loss where it has a coefficient, summed over the tokens of a batch."""

    chunk_tokens: int | None = None
    """Tokens whose logits are held at a time; None holds all of them."""
    z_loss: float = 0.0
    """Coefficient of log(Z)²."""
    part: VocabularyPart | None = None
    """The words whose logits this rank computes, where they are divided among ranks."""

    @staticmethod
    def of(config: TrainingConfig, part: VocabularyPart | None = None) -> "TokenLoss":
        """The loss that a configuration says, on a rank with this part of the vocabulary."""
        return TokenLoss(config.loss_chunk_tokens, config.z_loss, part)

    def __call__(self, model: nn.Module, batch: Batch, hidden: Tensor | None = None) -> LossSum:
        """Run the model, or its last stage over the `hidden` states of the stage before, over a batch on its device.

        In chunks the loss is computed inside the model's forward, where sharding has gathered the head's weight.
        """
        inputs = (batch.tokens if hidden is None else hidden, batch.positions, batch.documents)
        if self.chunk_tokens is None:
            return loss_sum(model(*inputs), batch.labels, self.z_loss, self.part)
        loss = partial(
            linear_loss_sum,
            labels=batch.labels,
            chunk_tokens=self.chunk_tokens,
            z_loss=self.z_loss,
            part=self.part,
        )
        return model(*inputs, loss=loss)
