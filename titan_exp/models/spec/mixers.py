"""Mixers of a layer: softmax attention, and linear attention with a recurrent state. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from titan_exp.ops.attention.mask_pattern import MaskPattern


@dataclass(frozen=True)
class QueryTemperature:
    """Scaling of queries by position (Llama 4): 1 + coefficient · ln(1 + floor((position + 1) / floor_scale))."""

    coefficient: float  # coefficient of the logarithm
    floor_scale: int  # number of positions for which the factor stays the same


@dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention of one layer."""

    heads: int  # query heads
    kv_heads: int  # key and value heads; each serves `heads / kv_heads` query heads
    qk_dim: int  # width of a query or key head
    v_dim: int  # width of a value head
    qk_dim_key: str = "model.head_dim"  # key of the configuration that sets `qk_dim`, for error messages
    window: int | None = None  # sliding window in keys, including the token itself; None means no window
    chunk: int | None = None  # chunk length: keys in the same chunk of positions are visible; None means no chunks
    sinks: bool = False
    """True if the softmax has one learned logit per head beside the keys, the vector `attention.sinks`."""
    scale: float | None = None  # factor of the scores; None is 1 / sqrt(qk_dim)
    rope: bool = True  # False if queries and keys are not rotated
    rotated_norm_eps: float | None = None
    """Epsilon of an RMSNorm without weight over query and key heads after RoPE; None is none."""
    temperature: QueryTemperature | None = None  # scaling of queries by position
    causal: bool = True  # False if tokens see later ones too
    rotary_dim: int | None = None
    """Number of first features of a query or key head that RoPE rotates; None is all of them."""
    gated: bool = False
    """True if each query head has a gate, whose sigmoid multiplies the head's output. In the rows of `attention.qkv`
    it follows its query."""

    @property
    def group(self) -> int:
        """Query heads per key and value head."""
        return self.heads // self.kv_heads

    @property
    def pattern(self) -> MaskPattern:
        """Mask pattern: the keys that a query sees."""
        return MaskPattern(self.window, self.chunk, self.causal)

    def flops_per_token(self, seq_len: int) -> float:
        """Forward and backward FLOPs of scores and weighted values per token, over visible keys only."""
        return 3 * self.heads * self.pattern.visible_per_query(seq_len) * 2 * (self.qk_dim + self.v_dim)


@dataclass(frozen=True)
class LinearAttentionSpec:
    """Linear attention of one layer by the gated delta rule (Yang et al. 2024): a state per value head, [key_dim,
    value_dim], which each token lets decay, corrects along its key and reads by its query.

    The rows of `attention.qkv` and the channels of the convolution go by key head (its query, its key, the values of
    its value heads), so that a contiguous slice holds whole heads.
    """

    key_heads: int  # query and key heads; each serves `value_heads / key_heads` value heads
    value_heads: int  # value heads, each with a state, a decay and a write strength
    key_dim: int  # width of a query or key head
    value_dim: int  # width of a value head
    taps: int = 4  # tokens that the causal convolution of queries, keys and values reads, the token itself included
    decay: Literal["head", "channel"] = "head"
    """Decay of the state: one number per value head (Gated DeltaNet), or one per feature of a key (Kimi Delta
    Attention)."""
    gate: Literal["silu", "sigmoid"] = "silu"  # function of the gate that multiplies the normalized output
    strongest_write: float = 1.0
    """Upper bound of the write strength. With 2, the transition of the state may have negative eigenvalues."""
    norm_eps: float = 1e-6  # epsilon of the norm over the outputs of a value head
    backend: Literal["auto", "torch", "fla"] = "auto"  # requested kernels
    rates: tuple[float, float] = (0.01, 16.0)  # bounds of initial decay rates, which are uniform between them
    steps: tuple[float, float] | None = None
    """Bounds of initial time steps, which are uniform between them in logarithm; the bias of the decay is their inverse
    softplus. None starts the bias with ones."""

    @property
    def group(self) -> int:
        """Value heads per key head."""
        return self.value_heads // self.key_heads

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def decays(self) -> int:
        """Decays per token."""
        return self.value_heads * (self.key_dim if self.decay == "channel" else 1)

    def flops_per_token(self, seq_len: int) -> float:
        """Forward and backward FLOPs per token of the convolution and of the delta rule in chunks: scores of keys and
        queries within a chunk, the triangular solve, and the state's reads and update. They do not depend on `seq_len`.
        """
        key, value = self.key_dim, self.value_dim
        rule = 4 * CHUNK * key + 2 * CHUNK * value + 6 * key * value + CHUNK * (key + value)
        return 3.0 * (self.value_heads * rule + 2 * self.taps * self.channels)


CHUNK = 64  # tokens that the delta rule computes at once, between two updates of the state
