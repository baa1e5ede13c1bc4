"""Largest feature of the embedded tokens."""

from typing import Any

from torch import Tensor, nn

from titan_exp.trainer.module_metrics.metric import ModuleMetric


class EmbeddingPeak(ModuleMetric):
    """Largest absolute feature behind the embedding."""

    name = "embedding_peak"

    @classmethod
    def observes(cls, path: str, module: nn.Module) -> bool:
        """True for the embedding."""
        return path == "embedding"

    def value(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        """Largest absolute feature."""
        return output.abs().amax()
