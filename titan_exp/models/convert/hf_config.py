"""Hugging Face's `config.json` and `generation_config.json`, from a model config and back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.schema.component import builtin_components, component
from titan_exp.models.spec.transformer import TransformerConfig


@dataclass(frozen=True)
class HuggingFace:
    """A family's class in `transformers`."""

    model_type: str
    """Name in `config.json`."""
    architectures: tuple[str, ...]
    """Classes in `transformers`."""
    fixed: Mapping[str, object]
    """Required values of keys in `config.json`; absent keys are accepted."""
    to_config: Callable[[Any], dict[str, Any]]
    """Keys of `config.json` from the family's config."""
    from_config: Callable[[Mapping[str, Any], str], ModelConfig]
    """The family's config from `config.json` and a name."""


def to_huggingface(config: ModelConfig, *, dtype: str, special_tokens: Mapping[str, Any]) -> dict[str, Any]:
    """Content of `config.json`; `dtype` is torch's name (`bfloat16`), `special_tokens` the known token ids."""
    family: HuggingFace = component("model", config.architecture).huggingface
    return {
        "architectures": list(family.architectures),
        "model_type": family.model_type,
        **family.to_config(config),
        **special_tokens,
        "use_cache": True,
        "torch_dtype": dtype,
    }


def from_huggingface(values: Mapping[str, Any], name: str, architecture: str | None = None) -> ModelConfig:
    """Model config from the content of a `config.json`, of any version of `transformers`.

    `architecture` names the family that reads it; None takes the built-in one of its `model_type`.

    Raises:
        UserError: no family reads it, or it has parts that the family does not compute.
    """
    family = _family(values) if architecture is None else component("model", architecture).huggingface
    for key, wanted in family.fixed.items():
        if values.get(key, wanted) != wanted:
            raise UserError(f"config.json: {key}={values[key]!r}, but {family.model_type} here has {key}={wanted!r}.")
    if values.get("quantization_config"):
        raise UserError("config.json: quantized weights cannot be read; supported are fp32, bf16 and fp16.")
    try:
        return family.from_config(values, name)
    except KeyError as error:
        raise UserError(f"config.json has no {error.args[0]}, which a {family.model_type}'s has.") from error


def common_keys(config: TransformerConfig, *, rope_scaling: object, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `config.json` that all decoders with grouped-query attention and SwiGLU have."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": "silu",
        **extra,
        "initializer_range": config.init_std,
    }


def common_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `TransformerConfig` from those keys, without name, architecture, context and rope."""
    heads, dim = int(values["num_attention_heads"]), int(values["hidden_size"])
    return {
        "layers": int(values["num_hidden_layers"]),
        "dim": dim,
        "heads": heads,
        "kv_heads": int(values.get("num_key_value_heads") or heads),
        "head_dim": int(values.get("head_dim") or dim // heads),
        "ffn_dim": int(values["intermediate_size"]),
        "vocab_size": int(values["vocab_size"]),
        "norm_eps": float(values.get("rms_norm_eps", 1e-6)),
        "tied_embeddings": bool(values.get("tie_word_embeddings", False)),
        "init_std": float(values.get("initializer_range", 0.02)),
        "attention_backend": "auto",
    }


def rope_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE keys with `rope_theta` and `rope_type`: transformers 5 nests them, 4 does not."""
    rope = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    rope["rope_theta"] = rope.get("rope_theta") or values.get("rope_theta") or 10000.0
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    return rope


def generation_config(special_tokens: Mapping[str, Any]) -> dict[str, Any]:
    """Content of `generation_config.json`."""
    return {**special_tokens, "do_sample": True, "temperature": 0.8, "top_p": 0.95}


def special_tokens_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Ids of the begin- and end-of-text tokens in `config.json`."""
    return {key: values[key] for key in ("bos_token_id", "eos_token_id") if values.get(key) is not None}


def _family(values: Mapping[str, Any]) -> HuggingFace:
    found: dict[str, HuggingFace] = {}
    for name in builtin_components("model"):
        family: HuggingFace | None = getattr(component("model", name), "huggingface", None)
        if family is not None:
            found[family.model_type] = family
    kind = values.get("model_type")
    if kind not in found:
        raise UserError(f"config.json: model_type is {kind!r}; supported: {', '.join(map(repr, found))}.")
    return found[kind]
