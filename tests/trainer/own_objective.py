"""A user's objective: next-token cross-entropy that reports two statistics of the logits."""

from collections.abc import Mapping

import torch

from titan_exp.data.batch import Batch
from titan_exp.ops.cross_entropy import IGNORE_INDEX
from titan_exp.trainer.objective import LanguageModeling, Loss, Reduction


class LogitStatistics(LanguageModeling):
    """Reports the mean squared norm of a token's logits, and the largest logit."""

    takes_vocab_shard = True

    @property
    def metrics(self) -> Mapping[str, Reduction]:
        """Beside those of language modeling."""
        return {**super().metrics, "logit_square": "mean", "logit_max": "max"}

    def loss(self, logits: torch.Tensor, batch: Batch) -> Loss:
        """Logits are this rank's shard of the vocabulary under loss parallelism."""
        loss, predicted = super().loss(logits, batch), batch.labels != IGNORE_INDEX
        square = logits.detach().float().square().sum(-1)
        if self.vocab_shard is not None:
            square = self.vocab_shard.all_reduce_sum(square)
        statistics = {"logit_square": (square * predicted).sum(), "logit_max": logits.detach().float().amax()}
        return Loss(loss.total, {**loss.metrics, **statistics})
