"""The objective interface: loss sum, item count and metrics, normalized over the global batch."""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from titan_exp.data.batch import Batch

Reduction = Literal["mean", "sum", "max"]
"""Reduction of a metric over micro-batches and ranks. `mean` divides the sum by the items of the global batch."""


class Loss(NamedTuple):
    """Loss of a micro-batch, and its metrics; sums over the items of the micro-batch (or a maximum)."""

    total: Tensor
    """The differentiated loss, an fp32 scalar."""
    metrics: Mapping[str, Tensor]
    """Detached scalars: `loss`, which is logged and evaluated, and one per name in `Objective.metrics`."""


class Objective(Protocol):
    """A training objective. `LanguageModeling` is the built-in one."""

    @property
    def metrics(self) -> Mapping[str, Reduction]:
        """Metrics reported beside `loss`, each logged as `objective/NAME`. The same on all ranks."""
        ...

    def count(self, batch: Batch) -> int:
        """Items of a CPU batch of whole rows; the loss is the mean over those of the global batch."""
        ...

    def __call__(self, model: nn.Module, batch: Batch, hidden: Tensor | None = None) -> Loss:
        """Run the model, or its last pipeline stage on `hidden`, on a batch sharded for this rank."""
        ...


class MetricSums:
    """Metrics of one rank in one optimizer step, accumulated on the device over micro-batches."""

    def __init__(self, objective: Objective, device: torch.device) -> None:
        self._reductions: Mapping[str, Reduction] = {"loss": "mean", **objective.metrics}
        self.values = {
            name: torch.full((), -math.inf, device=device) if reduction == "max" else torch.zeros((), device=device)
            for name, reduction in self._reductions.items()
        }

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Accumulate the metrics of a micro-batch, normalized by `normalize_by_tokens`."""
        for name, value in metrics.items():
            if self._reductions[name] == "max":
                self.values[name].copy_(torch.maximum(self.values[name], value))
            else:
                self.values[name].add_(value)

    def reset(self) -> None:
        """Clear the sums in place, so that their addresses stay the same."""
        for name, value in self.values.items():
            value.fill_(-math.inf if self._reductions[name] == "max" else 0)


def normalize_by_tokens(
    objective: Objective, module: nn.Module, batch: Batch, tokens: Tensor, hidden: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run a micro-batch and return its share of the global mean loss and of each metric.

    Divided by the `token_count` of the global batch, gradients summed over micro-batches and ranks are those of the
    global mean, whatever the distribution of tokens.
    """
    total, metrics = objective(module, batch, hidden)
    means = {name for name in metrics if objective.metrics.get(name, "mean") == "mean"}
    return total / tokens, {name: value / tokens if name in means else value for name, value in metrics.items()}


def token_count(tokens: int, device: torch.device) -> Tensor:
    """The divisor of the loss, at least 1, as an fp32 scalar on the device.

    CUDA multiplies by the rounded inverse of a Python number, and a CUDA graph would freeze it.
    """
    return torch.full((), max(tokens, 1), dtype=torch.float32, device=device)
