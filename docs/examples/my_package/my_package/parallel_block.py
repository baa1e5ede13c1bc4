"""The block of `parallel_llama`."""

from typing import Any

from torch import Tensor, nn

from titan_exp.models.blocks.feed_forward import FeedForward
from titan_exp.models.blocks.transformer import Attention, RMSNorm
from titan_exp.models.spec.model_spec import LayerSpec
from titan_exp.ops.attention.sdpa import AttentionBackend


class ParallelBlock(nn.Module):
    """Attention and feed-forward of the same normalized input."""

    def __init__(self, layer: LayerSpec, norm_eps: float, backend: AttentionBackend, scale: float) -> None:
        super().__init__()
        vector = layer.vector("attention_norm")
        assert vector is not None
        self.attention_norm = RMSNorm(vector.size, norm_eps, vector.tp)
        self.attention = Attention(layer, norm_eps, backend)
        self.feed_forward = FeedForward(layer)
        self.scale = scale

    def forward(self, x: Tensor, rope: Any, mask: Any) -> Tensor:
        """One layer. `mask` is None without data.document_mask, `rope` without a RoPE in the spec."""
        normed = self.attention_norm(x)
        return x + self.scale * (self.attention(normed, rope, mask) + self.feed_forward(normed))
