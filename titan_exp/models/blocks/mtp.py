"""Module of multi-token prediction (DeepSeek-AI 2024, V3, section 2.2): a block that sees a token ahead."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from titan_exp.models.blocks.linear import linear
from titan_exp.models.blocks.transformer import TransformerBlock, norm
from titan_exp.models.spec.model_spec import LayerSpec
from titan_exp.models.spec.tp_plan import SEQUENCE_PARALLEL, TPStyle
from titan_exp.ops.attention.sdpa import AttentionBackend


class MTPModule(TransformerBlock):
    """Block over the joined hidden states of the depth before and embeddings of the next tokens, and its output norm.

    Hidden states are those that a head reads: behind the model's final norm for the first module, behind `norm` for the
    next. The report says only "the representation given by the main model"; vLLM, SGLang and llama.cpp decode with the
    published weights from behind the norm. As in those weights, the embedding is the first half of the projection's
    input.
    """

    def __init__(
        self, layer: LayerSpec, norm_eps: float, backend: AttentionBackend, attention: nn.Module | None = None
    ) -> None:
        super().__init__(layer, norm_eps, backend, attention)
        self._plan: dict[str, TPStyle] = {"projection": SEQUENCE_PARALLEL}
        self.embedding_norm = norm(layer, "embedding_norm", norm_eps)
        self.hidden_norm = norm(layer, "hidden_norm", norm_eps)
        self.projection = linear(layer, "projection")
        self.norm = norm(layer, "norm", norm_eps)

    def tp_plan(self) -> dict[str, TPStyle]:
        """Tensor-parallel sharding: the projection is replicated, over this rank's tokens."""
        return self._plan

    def forward(
        self,
        x: Float[Tensor, "batch part dim"],
        rope: tuple[Float[Tensor, "batch_or_1 seq 1 _"], ...],
        mask: Any,
        embedded: Float[Tensor, "batch part dim"] | None = None,
    ) -> Float[Tensor, "batch part dim"]:
        """Hidden states of this depth, normalized for the head, from those of the depth before and from the embeddings
        of the tokens that many places ahead."""
        assert embedded is not None, "the module reads the next tokens"
        joined = torch.cat((self.embedding_norm(embedded), self.hidden_norm(x)), dim=-1)
        return self.norm(super().forward(self.projection(joined), rope, mask))
