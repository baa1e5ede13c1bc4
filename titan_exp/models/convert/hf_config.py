"""Hugging Face's `config.json` and `generation_config.json`, from a model config and back."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from titan_exp.config.errors.did_you_mean import listed
from titan_exp.config.errors.user_error import UserError, Violation, shown
from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.schema.component import builtin_components, component
from titan_exp.models.convert.rope_keys import rope_keys
from titan_exp.models.spec.moe import MoEConfig
from titan_exp.models.spec.transformer import AttentionConfig

ANY_TYPE = "*"
"""`model_type` of the family that reads those of no other family."""


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
    other_types: tuple[str, ...] = ()
    """Other values of `model_type` that the family reads; it writes one by returning it from `to_config`."""
    violations: Callable[[Any], Iterable[Violation]] = lambda config: ()
    """Values of the family's config that `config.json` cannot express."""
    unread: Callable[[Mapping[str, Any]], Iterable[str]] = lambda values: ()
    """Prefixes of tensors that the family does not read, from `config.json`."""
    multimodal_type: str = ""
    """`model_type` of a multimodal model whose `text_config` is one of the family's."""
    multimodal_prefix: str = ""
    """Prefix of its language model's tensors; the others are not read."""


def to_huggingface(config: ModelConfig, *, dtype: str, special_tokens: Mapping[str, Any]) -> dict[str, Any]:
    """Content of `config.json`; `dtype` is torch's name (`bfloat16`), `special_tokens` the known token ids.

    Raises:
        UserError: the file cannot express the model.
    """
    family: HuggingFace = component("model", config.architecture).huggingface
    violations = export_violations(config)
    if violations:
        raise UserError(f"config.json of {family.model_type} cannot express this model.", violations)
    return {
        "architectures": list(family.architectures),
        "model_type": family.model_type,
        **family.to_config(config),
        **special_tokens,
        "use_cache": True,
        "torch_dtype": dtype,
    }


def export_violations(config: ModelConfig) -> list[Violation]:
    """Values of a config that `config.json` cannot express."""
    return list(component("model", config.architecture).huggingface.violations(config))


def from_huggingface(values: Mapping[str, Any], name: str, architecture: str | None = None) -> ModelConfig:
    """Model config from the content of a `config.json`, of any version of `transformers`.

    `architecture` names the family that reads it; None takes the built-in one of its `model_type`.

    Raises:
        UserError: no family reads it, or it has parts that the family does not compute.
    """
    family = _family(values, architecture)
    for key, wanted in family.fixed.items():
        if values.get(key, wanted) != wanted:
            raise UserError(f"config.json: {key}={values[key]!r}, but {family.model_type} here has {key}={wanted!r}.")
    try:
        return family.from_config(values, name)
    except UserError as error:
        if family.model_type != ANY_TYPE:
            raise
        kinds = listed(map(repr, family_types()), "and")
        message = f"config.json: model_type is {values.get('model_type')!r}; families here are {kinds}."
        raise UserError(message if error.violations else f"{message} {error}", error.violations) from error
    except KeyError as error:
        raise UserError(f"config.json has no {error.args[0]}, which a {family.model_type}'s has.") from error


def config_json(folder: Path) -> dict[str, Any]:
    """Content of a folder's `config.json`.

    Raises:
        UserError: it is not JSON.
    """
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / 'config.json'} cannot be read: {error}") from error


def language_model(values: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Language model's part of a multimodal `config.json` and its tensors' prefix; else the whole and no prefix."""
    for name in builtin_components("model"):
        family: HuggingFace | None = getattr(component("model", name), "huggingface", None)
        if family is not None and values.get("model_type") == family.multimodal_type and "text_config" in values:
            return {"model_type": family.model_type, **values["text_config"]}, family.multimodal_prefix
    return values, ""


def unread_prefixes(values: Mapping[str, Any], architecture: str | None = None) -> tuple[str, ...]:
    """Prefixes of tensors beside a `config.json` that its family does not read."""
    return tuple(_family(values, architecture).unread(values))


def quantized_weights(values: Mapping[str, Any]) -> tuple[int, int] | Literal["mxfp4"] | None:
    """Rows and columns of a block of fp8 weights that share a scale, or MXFP4, from `config.json`; None for plain
    weights.

    Raises:
        UserError: the weights are quantized otherwise.
    """
    quantization = values.get("quantization_config")
    if not quantization:
        return None
    method, form = quantization.get("quant_method"), quantization.get("fmt", "e4m3")
    blocks = quantization.get("weight_block_size")
    if method == "mxfp4":
        return "mxfp4"
    if method != "fp8" or form != "e4m3" or not blocks:
        found = f"quant_method={method!r}, fmt={form!r}, weight_block_size={blocks!r}"
        raise UserError(
            f"config.json: weights quantized with {found} cannot be read. Supported are fp32, bf16 and fp16, and fp8 "
            "(e4m3) with a scale per block, as in DeepSeek V3, and MXFP4, as in GPT-OSS. Dequantize the others with "
            "transformers and save_pretrained."
        )
    rows, columns = map(int, blocks)
    return rows, columns


def common_keys(config: AttentionConfig, *, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `config.json` that all decoders with grouped-query attention have; `extra` names those of the rest."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        **rope_keys(config.rope, config.context),
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": "silu",
        **extra,
        "initializer_range": config.init_std,
    }


def common_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `AttentionConfig` from those keys, without name, architecture, context and rope."""
    heads, dim = int(values["num_attention_heads"]), int(values["hidden_size"])
    return {
        "layers": int(values["num_hidden_layers"]),
        "dim": dim,
        "heads": heads,
        "kv_heads": int(values.get("num_key_value_heads") or heads),
        "head_dim": int(values.get("head_dim") or dim // heads),
        "vocab_size": int(values["vocab_size"]),
        "norm_eps": float(values.get("rms_norm_eps", 1e-6)),
        "tied_embeddings": bool(values.get("tie_word_embeddings", False)),
        "init_std": float(values.get("initializer_range", 0.02)),
        "attention_backend": "auto",
    }


def routed_experts(values: Mapping[str, Any], key: str) -> int:
    """Number of experts, under the family's key or under that of transformers 5."""
    return int(values[key] if key in values or "num_local_experts" not in values else values["num_local_experts"])


PLAIN_ROUTER: Mapping[str, Any] = {
    "shared_experts": 0,
    "score": "softmax",
    "router_bias": False,
    "scale": 1.0,
    "groups": 1,
    "active_groups": 1,
    "group_score": "max",
}
"""Fields of `MoEConfig` for which the `config.json` of most families with experts has no keys."""


def router_violations(moe: MoEConfig, wanted: Mapping[str, Any], family: str) -> Iterator[Violation]:
    """Fields of a router that differ from those of a family in `transformers`."""
    for key, value in wanted.items():
        if (own := getattr(moe, key)) != value and ("group" not in key or moe.groups > 1):
            reason = f"{family} has no such router in transformers"
            yield Violation(f"model.moe.{key}", own, reason, f"model.moe.{key}={shown(value)}")


def generation_config(special_tokens: Mapping[str, Any]) -> dict[str, Any]:
    """Content of `generation_config.json`."""
    return {**special_tokens, "do_sample": True, "temperature": 0.8, "top_p": 0.95}


def special_tokens_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Ids of the begin- and end-of-text tokens in `config.json`."""
    return {key: values[key] for key in ("bos_token_id", "eos_token_id") if values.get(key) is not None}


def family_types() -> list[str]:
    """Every `model_type` that a family here reads, without those of transformers' other classes."""
    families = _families()
    return [
        kind
        for kind in (*families, *(family.multimodal_type for family in families.values()))
        if kind not in ("", ANY_TYPE)
    ]


def _families() -> dict[str, HuggingFace]:
    found: dict[str, HuggingFace] = {}
    for name in builtin_components("model"):
        family: HuggingFace | None = getattr(component("model", name), "huggingface", None)
        if family is not None:
            found |= dict.fromkeys((family.model_type, *family.other_types), family)
    return found


def _family(values: Mapping[str, Any], architecture: str | None) -> HuggingFace:
    """Family of an architecture; None takes the built-in one of the `model_type`."""
    if architecture is not None:
        return component("model", architecture).huggingface
    found, kind = _families(), values.get("model_type")
    if kind not in found and ANY_TYPE in found:
        return found[ANY_TYPE]
    if kind not in found:
        raise UserError(f"config.json: model_type is {kind!r}; supported: {', '.join(map(repr, found))}.")
    return found[kind]
