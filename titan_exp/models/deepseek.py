"""DeepSeek V2 and V3 (DeepSeek-AI 2024), and Kimi K2: latent attention, dense layers first, then experts.

V2 scores experts by a softmax and groups by their best expert; V3 by sigmoids with a bias for the choice, and groups by
their two best.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.types import BlockCount, PositiveInt
from titan_exp.models.convert.decoder_state_dict import HUGGINGFACE, decoder_map
from titan_exp.models.convert.deepseek_config import (
    FIXED,
    V2,
    V3,
    config_fields,
    config_json,
    inexpressible,
    unread_layers,
)
from titan_exp.models.convert.hf_config import HuggingFace
from titan_exp.models.convert.state_dict_map import StateDictMap
from titan_exp.models.spec.decoder_config import decoder_spec
from titan_exp.models.spec.latent_attention import (
    LatentAttentionConfig,
    latent_attention,
    latent_attention_violations,
)
from titan_exp.models.spec.model_spec import LayerSpec, LinearSpec, ModelSpec, VectorSpec
from titan_exp.models.spec.moe import MoEConfig, RouterSpec
from titan_exp.models.spec.moe_layer import moe_linears, moe_violations
from titan_exp.models.spec.mtp import MTPConfig, mtp_layers, mtp_violations
from titan_exp.models.spec.swiglu import swiglu_linears, swiglu_violations

if TYPE_CHECKING:
    from titan_exp.models.blocks.transformer import TransformerBlock
    from titan_exp.ops.attention.sdpa import AttentionBackend


@dataclass(frozen=True)
class Config(LatentAttentionConfig):
    """Shape of a DeepSeek."""

    dense_layers: BlockCount
    """First layers, whose feed-forward is dense. E.g. `model=deepseek_debug model.dense_layers=3`."""
    ffn_dim: PositiveInt
    """Width of the feed-forward of dense layers; a multiple of 32. E.g. `model.ffn_dim=3072`."""
    moe: MoEConfig
    """Experts in place of the feed-forward layer. E.g. `model=qwen3_moe_debug model.moe.experts=16`."""
    mtp: MTPConfig = field(default_factory=MTPConfig)
    """Multi-token prediction: modules behind the last block, which predict further tokens in training and are not used
    in inference. E.g. `model=deepseek_debug model.mtp.depth=1`."""


def spec(config: Config) -> ModelSpec:
    """Dense layers first, then layers with experts, which modules of multi-token prediction have too."""
    dim, std = config.dim, config.init_std
    attention, linears, norms = latent_attention(config, out_std=std)

    def layer(feed_forward: tuple[LinearSpec, ...], router: RouterSpec | None) -> LayerSpec:
        vectors = (VectorSpec("attention_norm", dim), *norms, VectorSpec("feed_forward_norm", dim))
        return LayerSpec(attention, (*linears, *feed_forward), vectors, router)

    dense = swiglu_linears("feed_forward", dim, config.ffn_dim, std=std, out_std=std, key="model.ffn_dim")
    experts = moe_linears(config.moe, dim, std=std, out_std=std)
    layers = (layer(dense, None),) * config.dense_layers
    mixed = layer(experts, RouterSpec("feed_forward.router", dim, std, config.moe))
    layers += (mixed,) * (config.layers - len(layers))
    return decoder_spec(
        config,
        layers,
        rope=config.rope.resolved(config.context),
        rope_dim=config.qk_rope_head_dim,
        mtp_layers=mtp_layers(config.mtp, mixed, dim, std),
        mtp_weight=config.mtp.weight,
    )


def block(config: Config, layer: int, backend: "AttentionBackend") -> "TransformerBlock":
    """Pre-norm block with latent attention, dense or with experts."""
    from titan_exp.models.blocks.latent_attention import LatentAttention
    from titan_exp.models.blocks.mtp import MTPModule
    from titan_exp.models.blocks.transformer import TransformerBlock

    described, kind = spec(config).blocks[layer], TransformerBlock if layer < config.layers else MTPModule
    return kind(described, config.norm_eps, backend, LatentAttention(described, backend))


def violations(config: Config) -> Iterator[Violation]:
    """Shape violations of a DeepSeek."""
    if config.dense_layers > config.layers:
        yield Violation(
            "model.dense_layers",
            config.dense_layers,
            f"there are {config.layers} layers (model.layers)",
            f"at most model.dense_layers={config.layers}",
        )
    yield from latent_attention_violations(config)
    yield from swiglu_violations(config.ffn_dim, "model.ffn_dim")
    yield from moe_violations(config.moe)
    yield from mtp_violations(config.mtp, tied=config.tied_embeddings)


STATE_DICTS = {"huggingface": HUGGINGFACE}
"""Parameter names by checkpoint format."""


def state_dict_map(config: Config, form: str) -> StateDictMap:
    """State-dict map from another tool's tensors to our parameters."""
    return decoder_map(spec(config), STATE_DICTS[form])


huggingface = HuggingFace(
    model_type=V3,
    architectures=("DeepseekV3ForCausalLM",),
    fixed=FIXED,
    to_config=config_json,
    from_config=lambda values, name: Config(**config_fields(values, name)),
    violations=inexpressible,
    unread=unread_layers,
    other_types=(V2, "kimi_k2"),
)
"""`config.json` of Hugging Face's DeepSeek V2 and V3, and of Kimi K2."""
