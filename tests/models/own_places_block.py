"""Modules of `own_places`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_exp.models.blocks.linear import InitSpec
from titan_exp.models.blocks.transformer import Embedding, TransformerBlock
from titan_exp.models.decoder import Decoder


class Taps(nn.Conv1d):
    """Depthwise convolution over time [rows, tokens, dim]."""

    def __init__(self, dim: int, taps: int) -> None:
        super().__init__(dim, dim, taps, groups=dim, bias=False)

    def init_spec(self) -> dict[str, InitSpec]:
        """Small numbers."""
        return {"weight": InitSpec("normal", 0.1)}

    def forward(self, input: Tensor) -> Tensor:
        """The input plus its convolution with tokens before."""
        return input + super().forward(F.pad(input.mT, (self.kernel_size[0] - 1, 0))).mT


class PlacesBlock(TransformerBlock):
    """A Llama's block behind a convolution."""

    def __init__(self, layer: Any, config: Any, backend: Any) -> None:
        super().__init__(layer, config.norm_eps, backend)
        self.taps = Taps(config.dim, config.taps) if config.taps else nn.Identity()

    def forward(self, x: Tensor, rope: Any, mask: Any) -> Tensor:
        """One layer."""
        return super().forward(self.taps(x), rope, mask)


class PlacesDecoder(Decoder):
    """A decoder with a table of places."""

    def __init__(self, spec: Any, blocks: Any, config: Any, *, seq_len: int) -> None:
        super().__init__(spec, blocks, seq_len=seq_len)
        self.places = Embedding(config.context, config.dim, 0.02)
        self.local, self.here = config.local, list[Tensor]()

    def forward(self, x: Tensor, positions: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Logits."""
        seq = x.shape[1] if positions is None else positions.shape[1]
        counted = torch.arange(seq, device=x.device)[None]
        self.here = [counted if positions is None or self.local else positions]
        return super().forward(x, positions, *args, **kwargs)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings of tokens and places."""
        return self.embedding(tokens) + self.places(self.here[0].expand_as(tokens))
