"""RoPE scaling of Llama 3.1 in Hugging Face's `config.json`, from our config and back."""

from collections.abc import Mapping
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.models.convert.hf_config import rope_values
from titan_exp.models.spec.rope import RopeConfig


def llama3_keys(rope: RopeConfig) -> dict[str, Any] | None:
    """Value of `rope_scaling`, whose keys every version of transformers reads."""
    if rope.scaling == "none":
        return None
    return {
        "rope_type": "llama3",
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_context,
    }


def llama3_rope(values: Mapping[str, Any], context: int) -> RopeConfig:
    """Embedding from the keys of a `config.json` with this context.

    Raises:
        UserError: its scaling is another one.
    """
    keys = rope_values(values)
    theta, kind = float(keys["rope_theta"]), keys["rope_type"]
    if kind not in ("default", "llama3"):
        raise UserError(f"config.json: rope scaling {kind!r} is not supported; default and llama3 are.")
    if kind == "default":
        return RopeConfig(theta, "none", 1.0, 1.0, 4.0, context)
    return RopeConfig(
        theta,
        "llama3",
        float(keys["factor"]),
        float(keys["low_freq_factor"]),
        float(keys["high_freq_factor"]),
        int(keys["original_max_position_embeddings"]),
    )
