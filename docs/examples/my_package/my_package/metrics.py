"""Metrics of modules."""

from typing import Any

import torch
from torch import Tensor, nn

from titan_exp.trainer.module_metrics.metric import ModuleMetric


class BlockSquares(ModuleMetric):
    """Mean square of the residual stream behind each block."""

    name = "block_mean_square"
    reduction = "mean"

    @classmethod
    def observes(cls, path: str, module: nn.Module) -> bool:
        """True for blocks."""
        return path.startswith("blocks.") and path.count(".") == 1

    def value(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        """Sum and count over the features of a micro-batch."""
        squares = output.float().square()
        return torch.stack([squares.sum(), torch.tensor(float(squares.numel()), device=squares.device)])
