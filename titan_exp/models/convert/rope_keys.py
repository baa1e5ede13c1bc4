"""RoPE and its context scaling in Hugging Face's `config.json`, from our config and back."""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from titan_exp.config.errors.user_error import UserError
from titan_exp.models.spec.rope import PlainRope, ScaledRope, magnitude

SCALINGS = ("linear", "llama3", "yarn")
"""Values of `rope_type` beside `default`, which have our names."""
YARN_KEYS = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
"""Keys of YaRN with our names."""
LLAMA3_KEYS = ("low_freq_factor", "high_freq_factor")
ORIGINAL = "original_max_position_embeddings"

Rope = TypeVar("Rope", bound=ScaledRope)


def rope_keys(rope: PlainRope, context: int) -> dict[str, Any]:
    """Keys of `config.json`, which every version of transformers reads, for a model of this context."""
    keys = {"max_position_embeddings": rope.longest(context), "rope_theta": rope.theta, "rope_scaling": None}
    rope = rope.resolved(context)
    if not isinstance(rope, ScaledRope) or rope.scaling == "none":
        return keys
    scaling: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "llama3":
        scaling |= {key: getattr(rope, key) for key in LLAMA3_KEYS}
    else:
        scaling["type"] = rope.scaling  # read by versions that know no llama3
    if rope.scaling == "yarn":
        scaling |= {key: getattr(rope, key) for key in YARN_KEYS}
        # transformers reads the coefficients together or not at all.
        if not (rope.mscale and rope.mscale_all_dim) and rope.magnitude != magnitude(rope.factor, 1.0):
            scaling["attention_factor"] = rope.magnitude
    if rope.scaling != "linear":
        scaling[ORIGINAL] = rope.original_context
    return {**keys, "rope_scaling": scaling}


def read_rope(values: Mapping[str, Any], context: int, kind: type[Rope]) -> Rope:
    """Embedding from the keys of a `config.json` with this context.

    Raises:
        UserError: its scaling is another one.
    """
    keys = rope_values(values)
    scaling = "none" if keys["rope_type"] == "default" else keys["rope_type"]
    if scaling not in ("none", *SCALINGS):
        raise UserError(f"config.json: rope scaling {scaling!r} is not supported; default, {', '.join(SCALINGS)} are.")
    given: dict[str, Any] = {one.name: one.default for one in fields(ScaledRope) if one.name != "theta"}
    given |= {"scaling": scaling, "original_context": None if kind is ScaledRope else context}
    if scaling != "none":
        original = keys.get(ORIGINAL) or context
        given["factor"] = float(keys.get("factor") or context / original)
        # Their linear scaling knows no original context, and most files state the stretched one.
        given["original_context"] = max(1, int(context / given["factor"])) if scaling == "linear" else int(original)
    if scaling == "llama3":
        given |= {key: float(keys[key]) for key in LLAMA3_KEYS}
    if scaling == "yarn":
        given |= {key: float(keys[key]) for key in ("beta_fast", "beta_slow", "mscale_all_dim") if keys.get(key)}
        given |= {"mscale": _mscale(keys, given["factor"]), "truncate": bool(keys.get("truncate", True))}
    return kind(float(keys["rope_theta"]), **given)


def rope_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE keys with `rope_theta` and `rope_type`: transformers 5 nests them, 4 does not."""
    rope = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    rope["rope_theta"] = rope.get("rope_theta") or values.get("rope_theta") or 10000.0
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    return rope


def _mscale(keys: Mapping[str, Any], factor: float) -> float:
    """Our coefficient with which cosines and sines get their factor in transformers."""
    own, all_dim, wanted = keys.get("mscale"), keys.get("mscale_all_dim") or 0.0, keys.get("attention_factor")
    if wanted is None and own and all_dim:
        return float(own)
    if (wanted is None and not all_dim) or factor <= 1:
        return 1.0
    wanted = magnitude(factor, 1.0) if wanted is None else float(wanted)
    mscale = round((wanted * magnitude(factor, all_dim) - 1) / (0.1 * math.log(factor)), 12)
    if mscale < 0:
        raise UserError(f"config.json: attention_factor={wanted:g} is not supported; at least 1 is.")
    return mscale
