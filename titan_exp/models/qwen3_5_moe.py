"""Qwen3.5 with experts (Qwen Team 2026): the layers of Qwen3-Next, with other names in published files."""

from dataclasses import dataclass

from titan_exp.models import family, qwen3_next
from titan_exp.models.convert.hf_keys import PLAIN_ROUTER, huggingface_class
from titan_exp.models.qwen3_5 import MULTIMODAL_PREFIXES, STATE_DICTS
from titan_exp.models.spec.model_spec import ModelSpec


@dataclass(frozen=True)
class Config(qwen3_next.Config):
    """Shape of a Qwen3.5 with experts."""


def spec(config: Config) -> ModelSpec:
    """Spec: layers with linear and with softmax attention, and experts in each."""
    return qwen3_next.spec(config)


block, violations = family.block, family.violations
state_dict_map = family.decoder_maps(STATE_DICTS)

huggingface = huggingface_class(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    Config,
    qwen3_next.hybrid_keys("qwen3_5_moe_text", qwen3_next.EXPERT_KEYS),
    qwen3_next.EXPERT_FIELDS,
    router={**PLAIN_ROUTER, "shared_experts": 1, "normalized": True},
    called="Qwen3.5 with experts",
    unread=lambda values: qwen3_next.UNREAD,
    multimodal_type="qwen3_5_moe",
    multimodal_prefixes=MULTIMODAL_PREFIXES,
)
