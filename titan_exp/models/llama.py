"""Llama 2 to 3.2 (Touvron et al. 2023, Grattafiori et al. 2024): grouped-query attention, RoPE, SwiGLU.

Meta's `params.json` beside `consolidated.*.pth` is incomplete: the feed-forward width follows from a formula, context
and tied head are missing, and `use_scaled_rope` means factor 8 in Llama 3.1 and 32 in Llama 3.2. Meta's loaders refuse
unknown keys, so `model.json` beside it holds the rest.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.foreign_file import NotedKeys, named_errors
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.config.schema.typed_config import validated
from titan_exp.models import family
from titan_exp.models.convert.decoder_state_dict import HUGGINGFACE, META, TORCHTUNE
from titan_exp.models.convert.hf_keys import Key, attention_keys, huggingface_class, rope_keys
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.models.spec.rope import RopeConfig
from titan_exp.models.spec.transformer import TransformerConfig, transformer_layer, transformer_spec


@dataclass(frozen=True)
class Config(TransformerConfig):
    """Shape of a Llama."""

    rope: RopeConfig
    """Rotary position embedding. E.g. `model.rope.theta=1e6`."""


def spec(config: Config) -> ModelSpec:
    """Spec: layers of one kind. Residual outputs start smaller by sqrt(2 · layers) (Radford et al. 2019)."""
    layer = transformer_layer(config, out_std=config.init_std / math.sqrt(2 * config.layers))
    return transformer_spec(config, (layer,) * config.layers)


STATE_DICTS = {"huggingface": HUGGINGFACE, "llama": META, "torchtune": TORCHTUNE}
"""Parameter names by checkpoint format."""
block, violations = family.block, family.violations
state_dict_map = family.decoder_maps(STATE_DICTS)

huggingface = huggingface_class(
    "llama",
    "LlamaForCausalLM",
    Config,
    attention_keys(
        rope_keys(RopeConfig, context=2048),
        {"intermediate_size": Key("ffn_dim"), "attention_bias": False, "mlp_bias": False},
    ),
)


def to_params(config: ModelConfig) -> dict[str, Any]:
    """Content of Meta's `params.json`. Raises UserError if Meta's Llama cannot have this shape."""
    assert isinstance(config, Config), "only Llama has Meta's tensor names"
    if config.head_dim * config.heads != config.dim:
        raise UserError(
            f"params.json cannot express model.head_dim={config.head_dim}, because it has no such key and takes "
            f"dim / heads = {config.dim / config.heads:g}. Use format=huggingface."
        )
    rope = config.rope.resolved(config.context)
    if rope.scaling not in ("none", "llama3"):
        raise UserError(f"params.json cannot express model.rope.scaling={rope.scaling}. Use format=huggingface.")
    multiple, multiplier = _width_formula(config)
    params: dict[str, Any] = {
        "dim": config.dim,
        "n_layers": config.layers,
        "n_heads": config.heads,
        "n_kv_heads": config.kv_heads,
        "vocab_size": config.vocab_size,
        "multiple_of": multiple,
        "norm_eps": config.norm_eps,
        "rope_theta": rope.theta,
    }
    if multiplier is not None:
        params["ffn_dim_multiplier"] = multiplier
    if rope.scaling == "llama3":
        params["use_scaled_rope"] = True
    return params


def from_params(params: Mapping[str, Any], name: str, *, vocab_size: int, ffn_dim: int, tied: bool) -> Config:
    """Config from the content of a `params.json` and the shapes of the tensors beside it. Raises UserError if a key is
    missing."""
    noted = NotedKeys(params)
    with named_errors(noted, "params.json", "a Llama's"):
        found = _from_params(noted, name, vocab_size=vocab_size, ffn_dim=ffn_dim, tied=tied)
    return validated(Config, asdict(found), "params.json")


def _from_params(params: Mapping[str, Any], name: str, *, vocab_size: int, ffn_dim: int, tied: bool) -> Config:
    dim, heads, layers = int(params["dim"]), int(params["n_heads"]), int(params["n_layers"])
    scaled, theta = bool(params.get("use_scaled_rope", False)), float(params.get("rope_theta", 10000.0))
    context = 131072 if scaled else 8192 if theta >= 500000 else 4096
    if scaled:
        factor = float(params.get("rope_scaling_factor", 32.0 if tied else 8.0))
        rope = RopeConfig(theta, "llama3", factor, 1.0, float(params.get("high_freq_factor", 4.0)), 8192)
    else:
        rope = RopeConfig(theta, "none", 1.0, 1.0, 4.0, context)
    return Config(
        name=name,
        architecture="llama",
        layers=layers,
        dim=dim,
        heads=heads,
        kv_heads=int(params.get("n_kv_heads") or heads),
        head_dim=dim // heads,
        ffn_dim=ffn_dim,
        vocab_size=vocab_size,
        context=context,
        norm_eps=float(params.get("norm_eps", 1e-5)),
        tied_embeddings=tied,
        rope=rope,
        init_std=0.02,
        attention_backend="auto",
    )


def feed_forward_width(dim: int, multiple_of: int, multiplier: float | None) -> int:
    """Feed-forward width by Meta's formula."""
    width = int(2 * (4 * dim) / 3)
    if multiplier is not None:
        width = int(multiplier * width)
    return multiple_of * ((width + multiple_of - 1) // multiple_of)


def _width_formula(config: Config) -> tuple[int, float | None]:
    """Roundest `multiple_of` and multiplier that give the width."""
    dim, ffn_dim = config.dim, config.ffn_dim
    multiples = [size for size in (4096, 2048, 1024, 512, 256, 128, 64, 32) if ffn_dim % size == 0]
    for multiple in multiples:
        if feed_forward_width(dim, multiple, None) == ffn_dim:
            return multiple, None
    for digits in range(1, 16):
        for multiple in multiples:
            multiplier = round(ffn_dim / int(8 * dim / 3), digits)
            if feed_forward_width(dim, multiple, multiplier) == ffn_dim:
                return multiple, multiplier
    raise UserError(f"params.json cannot express model.ffn_dim={ffn_dim} with model.dim={dim}. Use format=huggingface.")
