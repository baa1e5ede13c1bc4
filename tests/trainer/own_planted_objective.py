"""Objectives that average over what a rank sees, where a sum is asked for."""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from titan_exp.data.batch import Batch
from titan_exp.ops.cross_entropy import IGNORE_INDEX
from titan_exp.trainer.objective import LanguageModeling, Loss


@dataclass(frozen=True)
class MeanLoss(LanguageModeling):
    """The mean over a micro-batch instead of its sum."""

    def loss(self, logits: Tensor, batch: Batch) -> Loss:
        """Mean cross-entropy of a micro-batch."""
        found = super().loss(logits, batch)
        count = (batch.labels != IGNORE_INDEX).sum()
        return Loss(found.total / count, {name: value / count for name, value in found.metrics.items()})


@dataclass(frozen=True)
class HardTokens(LanguageModeling):
    """Tokens weighted by their loss, relative to the largest of a micro-batch."""

    def loss(self, logits: Tensor, batch: Batch) -> Loss:
        """Weighted cross-entropy."""
        each: Any = F.cross_entropy(
            logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
        )
        weights = each.detach() / each.detach().max()
        return Loss((weights * each).sum(), {"loss": each.detach().sum()})
