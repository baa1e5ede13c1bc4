"""The block of `own_statistics`."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from titan_exp.models.blocks.transformer import TransformerBlock
from titan_exp.ops.autograd import is_recomputing


class ReportingBlock(TransformerBlock):
    """Reports mean square and maximum of its output, and the number of tokens that it has seen."""

    metric_reductions: ClassVar = {"hidden_square": "mean", "hidden_max": "max", "block_tokens": "sum"}

    def reset_metrics(self) -> None:
        """Forget the previous step."""
        self._square, self._max, self._tokens = torch.zeros(()), torch.full((), -torch.inf), torch.zeros(())

    def metrics(self) -> dict[str, Tensor]:
        """Sums over this step's micro-batches on this rank."""
        return {
            "hidden_square": torch.stack([self._square, self._tokens]),
            "hidden_max": self._max,
            "block_tokens": self._tokens,
        }

    def forward(self, x: Tensor, rope: Any, mask: Any) -> Tensor:
        """One layer; statistics are of training alone."""
        out = super().forward(x, rope, mask)
        if self.training and not is_recomputing():
            hidden = out.detach().float()
            self._square = self._square + hidden.square().mean(-1).sum()
            self._max = torch.maximum(self._max, hidden.amax())
            self._tokens = self._tokens + hidden.shape[:-1].numel()
        return out
