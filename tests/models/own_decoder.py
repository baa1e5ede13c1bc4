"""The subclass of the decoder that `own_family` builds."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from titan_exp.models.decoder import Decoder
from titan_exp.models.spec.model_spec import ModelSpec


class ScaledDecoder(Decoder):
    """A decoder whose hidden states begin as a multiple of the embedding."""

    def __init__(self, spec: ModelSpec, blocks: Mapping[int, nn.Module], *, seq_len: int, scale: float) -> None:
        super().__init__(spec, blocks, seq_len=seq_len)
        self.scale = scale

    def forward(self, x: Tensor, *rest: Any, **named: Any) -> Any:
        """Hidden states of a stage before are scaled already."""
        return super().forward(x if x.is_floating_point() else self.embedding(x) * self.scale, *rest, **named)
