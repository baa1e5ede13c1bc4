"""Family defaults: block, shape rules and state-dict map that follow from a family's config and spec. Imports no
torch."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from titan_exp.config.errors.user_error import Violation
from titan_exp.config.schema.component import component
from titan_exp.models.convert.decoder_state_dict import HUGGINGFACE, TensorNames, decoder_map
from titan_exp.models.convert.state_dict_map import StateDictMap
from titan_exp.models.spec import transformer
from titan_exp.models.spec.feed_forward import moe_violations, swiglu_violations
from titan_exp.models.spec.linear_attention import linear_attention_violations
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.models.spec.rope import rope_violations

if TYPE_CHECKING:
    from torch import nn

    from titan_exp.models.blocks.transformer import TransformerBlock
    from titan_exp.ops.attention.sdpa import AttentionBackend


def block(config: transformer.DecoderConfig, layer: int, backend: "AttentionBackend") -> "TransformerBlock":
    """Build the block that the family's spec describes; after the last layer, a module of multi-token prediction."""
    from titan_exp.models.blocks.mixers import LatentAttention, LinearAttention
    from titan_exp.models.blocks.transformer import MTPModule, TransformerBlock

    described, kind = _spec(config).blocks[layer], TransformerBlock if layer < config.layers else MTPModule
    attention: nn.Module | None = None
    if isinstance(described.attention, transformer.LatentAttentionSpec):
        attention = LatentAttention(described, backend)
    elif described.linear_attention is not None:
        attention = LinearAttention(described)
    return kind(described, config.norm_eps, backend, attention)


def violations(config: transformer.DecoderConfig) -> Iterator[Violation]:
    """Violations by shapes that the shared blocks cannot compute, for the parts that the config has."""
    if isinstance(config, transformer.AttentionConfig):
        yield from transformer.attention_violations(config)
    if isinstance(config, transformer.LatentAttentionConfig):
        yield from transformer.latent_attention_violations(config)
    parts = vars(config)
    if "rotary_dim" in parts and isinstance(config, transformer.AttentionConfig):
        yield from transformer.rotary_violations(parts["rotary_dim"], config.head_dim)
    if "linear_attention" in parts:
        yield from linear_attention_violations(parts["linear_attention"])
    if "ffn_dim" in parts:
        yield from swiglu_violations(parts["ffn_dim"], "model.ffn_dim")
    yield from rope_violations(config.rope)
    if "moe" in parts:
        yield from moe_violations(parts["moe"])
    if "mtp" in parts:
        yield from transformer.mtp_violations(parts["mtp"], tied=config.tied_embeddings)


def decoder_maps(
    names: Mapping[str, TensorNames] = {"huggingface": HUGGINGFACE},
) -> Callable[[transformer.DecoderConfig, str], StateDictMap]:
    """Make a family's `state_dict_map` from another tool's tensors to our parameters, given the names of each
    format."""
    return lambda config, form: decoder_map(_spec(config), names[form])


def _spec(config: transformer.DecoderConfig) -> ModelSpec:
    return component("model", config.architecture).spec(config)
