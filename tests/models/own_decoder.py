"""The subclass of the decoder that `own_family` builds."""

from collections.abc import Mapping

from torch import Tensor, nn

from titan_exp.models.decoder import Decoder
from titan_exp.models.spec.model_spec import ModelSpec


class ScaledDecoder(Decoder):
    """A decoder whose hidden states begin as a multiple of the embedding."""

    def __init__(self, spec: ModelSpec, blocks: Mapping[int, nn.Module], *, seq_len: int, scale: float) -> None:
        super().__init__(spec, blocks, seq_len=seq_len)
        self.scale = scale

    def embed(self, tokens: Tensor) -> Tensor:
        """The embedding, scaled."""
        return super().embed(tokens) * self.scale
