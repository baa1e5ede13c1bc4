"""Interface of a training objective, metric accumulation, and normalization over the global batch."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from titan_exp.data.batch import MicroBatch

Reduction = Literal["mean", "sum", "max"]
"""Reduction of a metric over micro-batches and ranks. `mean` divides the sum by the items of the global batch."""


class Loss(NamedTuple):
    """Loss and metrics of a micro-batch, summed over its items (or a maximum, for `max` metrics)."""

    total: Tensor
    """Loss summed over the items, an fp32 scalar; backward starts here."""
    metrics: Mapping[str, Tensor]
    """Detached scalars: `loss` (logged, and used in evaluation) and one per name in `Objective.metrics`."""
    further: Sequence["Loss"] = ()
    """Weighted losses of `Batch.further`, each summed over its own tokens."""


class Objective(Protocol):
    """A training objective, as `LanguageModeling`; batches are of the kind that it trains on.

    Optional members: `prepare(batch, seed)` draws the random numbers of a CPU batch of whole rows, keyed by sample;
    `prepare_evaluation(batch)` completes one of an evaluation; `bind(spec)` returns the objective of a model;
    `has_perplexity`, False if exp(loss) means nothing.
    """

    @property
    def metrics(self) -> Mapping[str, Reduction]:
        """Metrics reported beside `loss`, each logged as `objective/NAME`. The same on all ranks."""
        ...

    def count(self, batch: Any) -> int:
        """Number of items (tokens) of a CPU batch of unsharded sequences, over which the loss is averaged."""
        ...

    def __call__(self, model: nn.Module, batch: Any, hidden: Tensor | None = None) -> Loss:
        """Run the model, or the last pipeline stage given `hidden`, on a batch sharded for this rank."""
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
        """Clear the sums in place: CUDA graphs hold their addresses."""
        for name, value in self.values.items():
            value.fill_(-math.inf if self._reductions[name] == "max" else 0)


def normalize_by_tokens(
    objective: Objective, module: nn.Module, batch: MicroBatch, tokens: Sequence[Tensor], hidden: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run a micro-batch and return its share of the global mean loss and of each metric.

    Each share is divided by the tokens of the global batch (`loss_divisors`), so that gradients summed over
    micro-batches and ranks are those of the global mean, however tokens are distributed.
    """
    found = objective(module, batch, hidden)
    total, metrics = _normalized(objective, found, tokens[0])
    for further, count in zip(found.further, tokens[1:], strict=True):
        share, reported = _normalized(objective, further, count)
        total, metrics = total + share, {**metrics, **reported}
    return total, metrics


def _normalized(objective: Objective, found: Loss, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    means = {name for name in found.metrics if objective.metrics.get(name, "mean") == "mean"}
    metrics = {name: value / tokens if name in means else value for name, value in found.metrics.items()}
    return found.total / tokens, metrics


def token_counts(objective: Objective, batch: MicroBatch) -> list[int]:
    """Predicted tokens of a CPU batch, then those of each of its further predictions."""
    return [objective.count(part) for part in (batch, *getattr(batch, "further", ()))]


def loss_divisors(tokens: Sequence[int], device: torch.device) -> list[Tensor]:
    """Numbers of tokens, at least 1, as fp32 scalars on the device.

    Division by a Python number multiplies by its rounded reciprocal on CUDA, and a CUDA graph would capture it.
    """
    return [torch.full((), max(count, 1), dtype=torch.float32, device=device) for count in tokens]
