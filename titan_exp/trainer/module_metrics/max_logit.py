"""Largest attention logit of each layer, as QK-clip reports it, without clipping."""

from typing import cast

from torch import nn

from titan_exp.config.torch_features import ATTENTION_BACKEND
from titan_exp.parallel.mesh import Mesh
from titan_exp.parallel.qk_clip import ClippableAttention, is_scoring, scoring_module, track_logits
from titan_exp.trainer.module_metrics.metric import ModuleMetric


class MaxLogit(ModuleMetric):
    """Largest logit over the visible keys. It computes QK^T a second time."""

    name = "max_logit"
    compiles = True
    needs = f"attention with scores that are not FlexAttention's ({ATTENTION_BACKEND}=flex)"

    @classmethod
    def observes(cls, path: str, module: nn.Module) -> bool:
        """True for an attention module whose scores can be computed here."""
        return is_scoring(module) and getattr(scoring_module(cast(ClippableAttention, module)), "backend", "") != "flex"

    @classmethod
    def attach(cls, path: str, module: nn.Module, mesh: Mesh) -> None:
        """Let the module that computes scores track their maximum, unless QK-clip already does."""
        attention = cast(ClippableAttention, module)
        if scoring_module(attention).max_logits is None:
            track_logits(path, attention, mesh)
