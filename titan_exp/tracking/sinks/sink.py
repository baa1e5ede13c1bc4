"""Metric sink interface, common to metrics.jsonl, the console, W&B and TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np

Value = float | int | None
"""A number, or None if unknown."""

Row = Mapping[str, Value]
"""Metrics of one logged step, with the same keys in every sink. Models, objectives and optimizers may add any others.

| key | meaning |
|---|---|
| `step`, `tokens`, `attempt` | optimizer steps and tokens of the whole job so far; number of the attempt |
| `loss` | mean over the tokens of the step's global batch, in nats per token |
| `grad_norm`, `lr` | global gradient norm before clipping; learning rate of the step |
| `clip/share`, `clip/factor` | share of numbers clamped or of parameters scaled; smallest factor (`grad_clip`) |
| `clip/norm/NAME` | norm of the group's gradients, before its `max_grad_norm` |
| `tokens_per_second`, `tokens_per_second_per_device` | throughput since the previous row, without evaluation, saves |
| `tflops`, `mfu` | model TFLOP/s per device; its fraction of the dense bf16 peak, from 0 to 1 |
| `memory`, `memory_reserved` | peak GiB of a rank in this attempt: allocated (resident set on CPU), reserved |
| `validation_loss`, `validation_perplexity`, `validation_tokens` | over the whole validation split, when evaluated |
| `validation_bits_per_byte` | the same in bits per byte of text, where the tokenizer says how long its tokens are |
| `validation_loss/NAME`, `validation_bits_per_byte/NAME` | per source of a mixture, and per set of `evaluation.sets` |
| `averaged/validation_loss`, `averaged/validation_loss/NAME` | the same with the averaged weights (`weight_average`) |
| `objective/NAME`, `model/NAME`, `optimizer/NAME` | reported metrics, reduced over all ranks |
| `experts/load_max` | tokens of the busiest expert over the mean, of the worst layer |
| `experts/entropy` | entropy of the load, mean over layers; 1 is balanced |
| `experts/dead` | experts without a token in the global batch, sum over layers |
| `experts/bias_range` | max − min of the router biases, largest of the layers |
| `experts/balance_loss`, `experts/z_loss` | sum over layers, with their factors; `loss` is without them |
| `experts/layer_3/NAME` | the same of one layer |
| `epoch`, `epoch/NAME` | passes over the training documents so far; per source of a mixture |
"""

REPORTED = ("objective/", "model/", "optimizer/", "averaged/")
"""Prefixes of metrics that the objective, the model or the optimizer reports, and of averaged weights' metrics."""


class Sink(Protocol):
    """Receives rows on rank 0 or in the launching process."""

    def log(self, row: Row) -> None:
        """Record the row of one step."""
        ...

    def close(self, state: str) -> None:
        """Finish with the run's final state: `done`, `failed` or `preempted`."""
        ...


@runtime_checkable
class LateSink(Protocol):
    """A sink that also takes rows of earlier steps."""

    def late(self, axis: str, row: Row) -> None:
        """Record values that became known after rows of later steps. The key `axis` has their step, and is their step
        axis where steps must ascend."""
        ...


@runtime_checkable
class ImageSink(Protocol):
    """A sink that also takes images."""

    def image(self, name: str, step: int, image: np.ndarray) -> None:
        """Record an image [height, width, 3] in uint8 of a step."""
        ...
