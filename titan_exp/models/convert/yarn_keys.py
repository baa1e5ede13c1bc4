"""YaRN in Hugging Face's `config.json`, from our config and back."""

from collections.abc import Mapping
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.models.convert.hf_config import rope_values
from titan_exp.models.spec.rope import YarnRope

EQUAL_KEYS = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")


def yarn_keys(rope: YarnRope) -> dict[str, Any]:
    """Keys of `config.json` from an embedding whose scaling is `none` or `yarn`."""
    if rope.scaling == "none":
        return {"rope_theta": rope.theta, "rope_scaling": None}
    equal = {key: getattr(rope, key) for key in EQUAL_KEYS}
    scaling = {"rope_type": "yarn", "type": "yarn", **equal, "original_max_position_embeddings": rope.original_context}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def yarn_rope(values: Mapping[str, Any], context: int) -> YarnRope:
    """Embedding from the keys of a `config.json` with this context.

    Raises:
        UserError: its scaling is another one.
    """
    keys = rope_values(values)
    if keys["rope_type"] not in ("default", "yarn"):
        raise UserError(f"config.json: rope scaling {keys['rope_type']!r} is not supported; default and yarn are.")
    yarn = keys["rope_type"] == "yarn"
    return YarnRope(
        float(keys["rope_theta"]),
        scaling="yarn" if yarn else "none",
        factor=float(keys["factor"]) if yarn else 1.0,
        beta_fast=float(keys.get("beta_fast") or 32),
        beta_slow=float(keys.get("beta_slow") or 1),
        mscale=float(keys.get("mscale") or 1),
        mscale_all_dim=float(keys.get("mscale_all_dim") or 0),
        truncate=bool(keys.get("truncate", True)),
        original_context=int(keys["original_max_position_embeddings"]) if yarn else context,
    )
