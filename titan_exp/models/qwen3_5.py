"""Qwen3.5, dense (Qwen Team 2026): the layers of Qwen3-Next with SwiGLU in place of experts.

Positions of text are those of plain RoPE, since the three axes of its multimodal positions are then equal. We train
the language model; the vision tower and the modules of multi-token prediction in published files are not read.
"""

from dataclasses import dataclass, replace

from titan_exp.models import family
from titan_exp.models.convert.hf_keys import Key, huggingface_class
from titan_exp.models.qwen3_next import MIXER_NAMES, NAMES, UNREAD, HybridConfig, hybrid_keys, hybrid_spec
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.models.spec.transformer import TransformerConfig, transformer_layer


@dataclass(frozen=True)
class Config(HybridConfig, TransformerConfig):
    """Shape of a dense Qwen3.5."""


def spec(config: Config) -> ModelSpec:
    """Spec: layers with linear and with softmax attention."""
    return hybrid_spec(config, transformer_layer(config, out_std=config.init_std, attention=config.variant))


FLAT_NAMES = replace(
    NAMES,
    linear_attention=replace(
        MIXER_NAMES,
        projections={
            "linear_attn.in_proj_qkv.weight": ("query", "key", "value"),
            "linear_attn.in_proj_z.weight": ("gate",),
            "linear_attn.in_proj_b.weight": ("beta",),
            "linear_attn.in_proj_a.weight": ("decay",),
        },
        by_head=False,
    ),
)
"""Names of `transformers`: all queries, then all keys, then all values."""
STATE_DICTS = {"huggingface": FLAT_NAMES}
block, violations = family.block, family.violations
state_dict_map = family.decoder_maps(STATE_DICTS)
MULTIMODAL_PREFIXES = {"model.language_model.": "model.", "lm_head.": "lm_head."}
"""Prefixes of the language model's tensors in published files, each with ours."""

huggingface = huggingface_class(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    Config,
    hybrid_keys("qwen3_5_text", {"intermediate_size": Key("ffn_dim")}),
    unread=lambda values: UNREAD,
    multimodal_type="qwen3_5",
    multimodal_prefixes=MULTIMODAL_PREFIXES,
)
