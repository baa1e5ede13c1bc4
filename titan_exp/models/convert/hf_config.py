"""`config.json` and `generation_config.json` of a Hugging Face Llama, from the model group and back."""

from collections.abc import Mapping
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.model import ModelConfig, RopeConfig


def to_huggingface(config: ModelConfig, *, dtype: str, special_tokens: Mapping[str, Any]) -> dict[str, Any]:
    """What `config.json` says.

    RoPE is said in the keys that every version of `transformers` reads.

    Args:
        config: the shape.
        dtype: type of the weights, as torch names it (`bfloat16`).
        special_tokens: `bos_token_id` and `eos_token_id`, where they are known.
    """
    rope = config.rope
    scaling = None
    if rope.scaling == "llama3":
        scaling = {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_context,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
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
        "rope_scaling": scaling,
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": config.init_std,
        **special_tokens,
        "use_cache": True,
        "torch_dtype": dtype,
    }


def generation_config(special_tokens: Mapping[str, Any]) -> dict[str, Any]:
    """What `generation_config.json` says."""
    return {
        **special_tokens,
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.95,
    }


def from_huggingface(values: Mapping[str, Any], name: str) -> ModelConfig:
    """The model group that a `config.json` describes.

    Args:
        values: its content, as any version of `transformers` writes it.
        name: what to call the model.

    Raises:
        UserError: it is no Llama, or one with parts that the built-in decoder does not have.
    """
    _refuse_what_differs(values)
    try:
        heads, dim = int(values["num_attention_heads"]), int(values["hidden_size"])
        context = int(values.get("max_position_embeddings", 2048))
        return ModelConfig(
            name=name,
            architecture="decoder",
            layers=int(values["num_hidden_layers"]),
            dim=dim,
            heads=heads,
            kv_heads=int(values.get("num_key_value_heads") or heads),
            head_dim=int(values.get("head_dim") or dim // heads),
            ffn_dim=int(values["intermediate_size"]),
            vocab_size=int(values["vocab_size"]),
            context=context,
            norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            tied_embeddings=bool(values.get("tie_word_embeddings", False)),
            rope=_rope(values, context),
            init_std=float(values.get("initializer_range", 0.02)),
            attention_backend="auto",
        )
    except KeyError as error:
        raise UserError(f"config.json does not say {error.args[0]}; a Llama's does.") from error


def special_tokens_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The ids that `config.json` gives to the begin and the end of a text."""
    return {key: values[key] for key in ("bos_token_id", "eos_token_id") if values.get(key) is not None}


def _rope(values: Mapping[str, Any], context: int) -> RopeConfig:
    # transformers 5 keeps all of it under rope_parameters, 4 beside each other.
    said = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    theta = float(said.get("rope_theta") or values.get("rope_theta") or 10000.0)
    kind = said.get("rope_type") or said.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta, "none", 1.0, 1.0, 4.0, context)
    if kind != "llama3":
        raise UserError(f"config.json: rope scaling {kind!r} is not there; what works is default and llama3.")
    return RopeConfig(
        theta,
        "llama3",
        float(said["factor"]),
        float(said["low_freq_factor"]),
        float(said["high_freq_factor"]),
        int(said["original_max_position_embeddings"]),
    )


def _refuse_what_differs(values: Mapping[str, Any]) -> None:
    kind = values.get("model_type")
    if kind != "llama":
        raise UserError(f"config.json: model_type is {kind!r}; what can be read is 'llama'.")
    for key, wanted in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
        if values.get(key, wanted) != wanted:
            raise UserError(f"config.json: {key}={values[key]!r}, but the built-in decoder has {key}={wanted!r}.")
    if values.get("quantization_config"):
        raise UserError("config.json: the weights are quantized; only plain ones in fp32, bf16 or fp16 can be read.")
