"""The decoder-only language model: embedding, blocks, norm, head.

Blocks are keyed by their number in the whole model, and every part may be absent, so that a pipeline stage is the same
class with the same parameter names.
"""

import math
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from titan_exp.config.groups.model import ModelConfig
from titan_exp.models.blocks.transformer import (
    Attention,
    Embedding,
    FeedForward,
    Head,
    LogitsLoss,
    RMSNorm,
    TransformerBlock,
)
from titan_exp.models.spec.pp_plan import PipelinePlan
from titan_exp.ops.attention.rope import Frequencies, RotaryEmbedding
from titan_exp.ops.attention.sdpa import AttentionBackend
from titan_exp.ops.loss.cross_entropy import LossSum


class Decoder(nn.Module):
    """A Llama-style decoder of the shape that `ModelConfig` says.

    Args:
        config: the shape.
        seq_len: longest sequence in tokens that it will see.
        attention_backend: kernel behind attention.
    """

    def __init__(self, config: ModelConfig, *, seq_len: int, attention_backend: AttentionBackend) -> None:
        super().__init__()
        self.config = config
        # Residual branches add up over 2 · layers of them; scaling their outputs keeps the stream's variance
        # (Radford et al. 2019).
        out_std = config.init_std / math.sqrt(2 * config.layers)
        self.embedding = Embedding(config.vocab_size, config.dim, config.init_std)
        self.blocks = nn.ModuleDict(
            {str(layer): _block(config, out_std, attention_backend) for layer in range(config.layers)}
        )
        self.norm = RMSNorm(config.dim, config.norm_eps)
        # A tied head borrows the embedding's weight in `forward`: one parameter, not two names for one.
        self.head = Head(config.dim, config.vocab_size, config.init_std, tied=config.tied_embeddings)
        rope = config.rope
        self.rope = RotaryEmbedding(
            config.head_dim,
            seq_len,
            Frequencies(
                rope.theta,
                scaling=rope.scaling,
                factor=rope.factor,
                low_freq_factor=rope.low_freq_factor,
                high_freq_factor=rope.high_freq_factor,
                original_context=rope.original_context,
            ),
        )

    def forward(
        self,
        x: Int[Tensor, "batch seq"] | Float[Tensor, "batch part dim"],
        positions: Int[Tensor, "batch seq"] | None = None,
        documents: Int[Tensor, "batch seq"] | None = None,
        loss: LogitsLoss | None = None,
    ) -> Float[Tensor, "batch seq vocab"] | Float[Tensor, "batch part dim"] | LossSum:
        """Logits of the next token, or what `loss` makes of them; hidden states where the head is another stage's.

        Args:
            x: token ids; the hidden states that a stage before has computed, where the embedding is that stage's. With
                sequence parallelism those are a rank's part of the tokens.
            positions: position of each token for RoPE; None counts from the sequence's start.
            documents: document number of each token; tokens see only their own document. None is plainly causal.
            loss: called with the hidden states [batch, seq, dim] and the head's weight [vocab, dim], instead of their
                product; here, because only inside `forward` is a sharded weight whole.
        """
        rope = self.rope(x.shape[1], positions)
        mask = self._mask(documents)
        # Of a tied model the last stage has the embedding as well, for its head.
        if not x.is_floating_point():
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x, rope, mask)
        if self.norm is None:
            return x
        return self.head(self.norm(x), self.embedding.weight if self.config.tied_embeddings else None, loss)

    def pp_plan(self) -> PipelinePlan:
        """What a pipeline leaves out of most stages."""
        shared = ("embedding",) if self.config.tied_embeddings else ()
        return PipelinePlan(first=("embedding",), last=("norm", "head"), shared=shared)

    def reset_buffers(self) -> None:
        """Compute what is not a parameter, once memory is real."""
        self.rope.reset()

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations of a training step per token, as executed.

        6 per parameter of a matmul (2 forward, 4 backward), the embedding's look-up left out, the head counted, tied
        or not; and causal attention, two matmuls of 2 · head_dim for each of on average (seq_len + 1) / 2 visible keys
        and each query head, times 3 for forward and backward.
        """
        config = self.config
        attention = (config.heads + 2 * config.kv_heads + config.heads) * config.head_dim * config.dim
        matmuls = config.layers * (attention + 3 * config.dim * config.ffn_dim) + config.dim * config.vocab_size
        visible = (seq_len + 1) / 2
        return 6 * matmuls + 3 * config.layers * config.heads * visible * 2 * (2 * config.head_dim)

    def _mask(self, documents: Int[Tensor, "batch seq"] | None) -> Any:
        if documents is None:
            return None
        block = next(iter(self.blocks.values()), None)
        return block and block.attention.core.mask(documents)  # type: ignore[union-attr]  # blocks are TransformerBlocks


def _block(config: ModelConfig, out_std: float, backend: AttentionBackend) -> TransformerBlock:
    std = config.init_std
    attention = Attention(
        config.dim,
        config.heads,
        config.kv_heads,
        config.head_dim,
        std=std,
        out_std=out_std,
        backend=backend,
    )
    return TransformerBlock(
        attention,
        FeedForward(config.dim, config.ffn_dim, std=std, out_std=out_std),
        config.dim,
        config.norm_eps,
    )
