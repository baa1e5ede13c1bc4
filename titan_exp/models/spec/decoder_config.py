"""Config fields that every decoder has whatever its attention, and its spec."""

from dataclasses import dataclass, field, replace
from typing import Literal

from titan_exp.config.groups.model import NO_CHANGE, ModelConfig
from titan_exp.config.groups.types import PositiveFloat, PositiveInt
from titan_exp.models.spec.model_spec import LayerSpec, ModelSpec
from titan_exp.models.spec.rope import PlainRope


@dataclass(frozen=True)
class DecoderConfig(ModelConfig):
    """Fields of a decoder."""

    vocab_size: PositiveInt
    """Rows of the embedding; at least as many as the tokenizer has tokens. E.g. `model.vocab_size=50304`."""
    norm_eps: PositiveFloat
    """Added to the mean square in RMSNorm. E.g. `model.norm_eps=1e-6`."""
    tied_embeddings: bool
    """The output head uses the embedding's weight. E.g. `model.tied_embeddings=true`."""
    rope: PlainRope
    """Rotary position embedding."""
    init_std: PositiveFloat = field(metadata=NO_CHANGE)
    """Standard deviation of initial weights. Llama scales residual outputs down by sqrt(2 · layers).
    E.g. `model.init_std=0.01`."""
    attention_backend: Literal["auto", "cudnn", "flash", "fa3", "fa4", "efficient", "math", "flex"] = field(
        metadata=NO_CHANGE
    )
    """Attention kernel. `auto` takes the fastest that torch brings along for this device; `fa3` and `fa4` are
    FlashAttention 3 and 4, from packages of their own; `flex` is FlexAttention.

    The log says which one runs. E.g. `model.attention_backend=cudnn`."""

    def effective(self) -> "DecoderConfig":
        """The same decoder with keys of RoPE that its scaling does not read at their defaults."""
        return replace(self, rope=self.rope.effective(self.context))


def decoder_spec(
    config: DecoderConfig,
    layers: tuple[LayerSpec, ...],
    *,
    rope: PlainRope,
    rope_dim: int,
    mtp_layers: tuple[LayerSpec, ...] = (),
    mtp_weight: float = 0.0,
) -> ModelSpec:
    """Spec of a decoder with these layers, which rotates `rope_dim` features of a head."""
    return ModelSpec(
        layers,
        dim=config.dim,
        vocab_size=config.vocab_size,
        tied=config.tied_embeddings,
        norm_eps=config.norm_eps,
        embedding_std=config.init_std,
        rope=rope,
        rope_dim=rope_dim,
        attention_backend=config.attention_backend,
        mtp_layers=mtp_layers,
        mtp_weight=mtp_weight,
    )
