"""The block of `own_head_norm`."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from titan_exp.models.blocks.transformer import Attention, TransformerBlock
from titan_exp.models.spec.model_spec import LayerSpec
from titan_exp.ops.attention.rope import rotate


class WholeNorm(nn.Module):
    """RMSNorm without a weight over all that it is called with."""

    def forward(self, x: Tensor) -> Tensor:
        """x / rms(x)."""
        return F.rms_norm(x, x.shape[-1:], None, 1e-5)


class NormedAttention(Attention):
    """Attention with a norm over all heads before the output projection."""

    def __init__(self, layer: LayerSpec, norm_eps: float, backend: Any) -> None:
        super().__init__(layer, norm_eps, backend)
        self.whole = WholeNorm()

    def forward(self, x: Tensor, rope: Any, mask: Any) -> Tensor:
        """[batch, part, dim] to [batch, part, dim]."""
        groups = self.qkv(x).unflatten(-1, (-1, self.group + 2, self.head_dim))
        query, key, value = (heads.flatten(2, 3) for heads in groups.split((self.group, 1, 1), dim=-2))
        turned = (rotate(heads, *rope[:2]).transpose(1, 2) for heads in (query, key))
        out = self.core(*turned, value.transpose(1, 2), mask)
        return self.out(self.whole(out.transpose(1, 2).flatten(2)))


def normed_block(layer: LayerSpec, norm_eps: float, backend: Any) -> TransformerBlock:
    """A Llama's block with this attention."""
    return TransformerBlock(layer, norm_eps, backend, NormedAttention(layer, norm_eps, backend))
