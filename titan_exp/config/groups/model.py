"""Group `model`: the architecture and its shape."""

from dataclasses import dataclass, field
from typing import Any, Literal

from titan_exp.config.groups.types import PositiveFloat, PositiveInt


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and the published way of stretching its context."""

    theta: PositiveFloat
    """Base of the geometric series of wavelengths."""
    scaling: Literal["none", "llama3"]
    """`llama3` slows the long wavelengths down as Llama 3.1 and 3.2 do."""
    factor: PositiveFloat
    """How many times longer the stretched context is (8 in Llama 3.1, 32 in Llama 3.2)."""
    low_freq_factor: PositiveFloat
    """Wavelengths longer than `original_context / low_freq_factor` are stretched by the whole factor."""
    high_freq_factor: PositiveFloat
    """Wavelengths shorter than `original_context / high_freq_factor` are left alone."""
    original_context: PositiveInt
    """Context in tokens that the model had before stretching."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model."""

    name: str
    """Published name of the model, shown in tables."""
    architecture: str
    """`decoder`, or the dotted name of a class in your own package, called with this group and the vocabulary size."""
    layers: PositiveInt
    """Number of transformer blocks."""
    dim: PositiveInt
    """Width of the residual stream."""
    heads: PositiveInt
    """Query heads."""
    kv_heads: PositiveInt
    """Key and value heads; fewer than `heads` is grouped-query attention."""
    head_dim: PositiveInt
    """Width of one head."""
    ffn_dim: PositiveInt
    """Width of the feed-forward layer; a multiple of 32."""
    vocab_size: PositiveInt
    """Rows of the embedding; at least as many as the tokenizer has tokens."""
    context: PositiveInt
    """Longest sequence in tokens that the published model was made for."""
    norm_eps: PositiveFloat
    """Added to the mean square in RMSNorm."""
    tied_embeddings: bool
    """The output head uses the embedding's weight."""
    rope: RopeConfig
    """Rotary position embedding."""
    init_std: PositiveFloat
    """Standard deviation of initial weights; residual outputs are scaled down by sqrt(2 · layers)."""
    attention_backend: Literal["auto", "cudnn", "flash", "fa3", "fa4", "efficient", "math", "flex"]
    """Kernel behind attention. `auto` takes the fastest that torch brings along for this device; `fa3` and `fa4` are
    FlashAttention 3 and 4, from packages of their own; `flex` is FlexAttention. The log says which one runs."""
    options: dict[str, Any] = field(default_factory=dict)
    """Extra keyword arguments for an architecture of your own."""
