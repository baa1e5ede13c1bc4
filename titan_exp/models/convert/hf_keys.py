"""Keys of Hugging Face's `config.json`: one table per family both writes and reads its config."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import reduce
from operator import attrgetter
from typing import Any, TypeVar

from titan_exp.config.errors.user_error import UserError, Violation, shown
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.config.schema.typed_config import validated
from titan_exp.models.convert.hf_config import HuggingFace
from titan_exp.models.spec.moe import BalanceConfig
from titan_exp.models.spec.rope import PlainRope, ScaledRope, magnitude

REQUIRED: Any = object()  # default of a key that every file has


def whole(value: Any) -> int:
    """Convert to an int. Raises ValueError for a number with a fraction."""
    if isinstance(value, float) and not value.is_integer():
        raise ValueError("it is not a whole number")
    return int(value)


def flag(value: Any) -> bool:
    """Convert to a bool. Raises ValueError for anything but true, false and null."""
    if value not in (True, False, None):
        raise ValueError("it is neither true nor false")
    return bool(value)


@dataclass(frozen=True)
class Key:
    """A key of `config.json`, and the field of the family's config that it fills."""

    field: str = ""
    """Field (`moe.experts`), or several with spaces between that have the same value; empty for a key that is only
    written."""
    kind: Callable[[Any], Any] = whole  # conversion of a value that is read
    default: Any = REQUIRED
    """Value of an absent key. A function gets the previous fields by name, and also replaces null and 0."""
    read: Callable[[Mapping[str, Any], Mapping[str, Any]], Any] | None = None
    """Value of the field, from the whole file and the previous fields; replaces `kind` and `default`."""
    write: Callable[[Any], Any] | None = None  # value of the key, from the family's config; replaces the field's
    refusal: str = ""
    """Message for a file whose value differs from the written one, with `{value}` for it; empty accepts any value."""


Keys = Mapping[str, Any]
"""Maps each name in the file, in the order of writing, to a `Key`, or to the value that it has in every file of the
family."""


def huggingface_class(
    model_type: str,
    name: str,
    config: type[ModelConfig],
    keys: Keys,
    given: Mapping[str, Any] = {},
    *,
    router: Mapping[str, Any] = {},
    called: str = "",
    **others: Any,
) -> HuggingFace:
    """Class of this name in `transformers`, whose `config.json` these keys both write and read. `given` has the values
    of fields without keys in the file, and `router` those of fields of `moe`. A config with another router is refused,
    in the name of the family that is `called` so."""
    kernels = [key for key in ("attention_backend", "linear_attention_backend") if key in config.__dataclass_fields__]
    constants = {**dict.fromkeys(kernels, "auto"), **given, **{f"moe.{name}": value for name, value in router.items()}}

    def router_violations(model: Any) -> Iterator[Violation]:
        for key, value in router.items():
            if (own := getattr(model.moe, key)) != value and ("group" not in key or model.moe.groups > 1):
                reason = f"{called} does not have such a router in transformers"
                yield Violation(f"model.moe.{key}", own, reason, f"use model.moe.{key}={shown(value)}")

    return HuggingFace(
        model_type,
        (name,),
        fixed={name: key for name, key in keys.items() if not isinstance(key, Key)},
        to_config=lambda model: written(keys, model),
        from_config=lambda values, name: _read(config, keys, constants | {"name": name}, values),
        **{"violations": router_violations, **others},
    )


def written(keys: Keys, model: Any) -> dict[str, Any]:
    """Keys and values to write for a family's config."""
    return {name: _value(key, model) if isinstance(key, Key) else key for name, key in keys.items()}


def _value(key: Key, model: Any) -> Any:
    return attrgetter(key.field.split()[0])(model) if key.write is None else key.write(model)


def _read(config: type[ModelConfig], keys: Keys, constants: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    found = {**constants, "architecture": config.__module__.removeprefix("titan_exp.models.")}
    for name, key in keys.items():
        if not isinstance(key, Key) or not key.field:
            continue
        if key.read is not None:
            value = key.read(values, found)
        elif callable(key.default):
            value = key.kind(values.get(name) or key.default(found))
        else:
            value = key.kind(values[name] if key.default is REQUIRED else values.get(name, key.default))
        found |= dict.fromkeys(key.field.split(), value)
    nested: dict[str, Any] = {}
    for field, value in found.items():
        *groups, last = field.split(".")
        reduce(lambda group, name: group.setdefault(name, {}), groups, nested)[last] = value
    model = validated(config, nested, "config.json")
    for name, key in keys.items():
        if isinstance(key, Key) and key.refusal and (value := values.get(name)) not in (None, [], _value(key, model)):
            raise UserError(f"config.json: {key.refusal.format(value=value)}")
    return model


def attention_keys(rope: Keys, keys: Keys) -> Keys:
    """Keys of a decoder with grouped-query attention: the common ones, with `rope`, around `keys`."""
    return {
        "vocab_size": Key("vocab_size"),
        "hidden_size": Key("dim"),
        "num_hidden_layers": Key("layers"),
        "num_attention_heads": Key("heads"),
        "num_key_value_heads": Key("kv_heads", default=lambda fields: fields["heads"]),
        "head_dim": Key("head_dim", default=lambda fields: fields["dim"] // fields["heads"]),
        "rms_norm_eps": Key("norm_eps", float, 1e-6),
        **rope,
        "tie_word_embeddings": Key("tied_embeddings", flag, False),
        "hidden_act": "silu",
        **keys,
        "initializer_range": Key("init_std", float, 0.02),
    }


PLAIN_ROUTER: Mapping[str, Any] = {
    "shared_experts": 0,
    "score": "softmax",
    "router_bias": False,
    "scale": 1.0,
    "groups": 1,
    "active_groups": 1,
    "group_score": "max",
}
"""Fields of `MoEConfig` for which most families with experts have no keys in `config.json`."""
GLOBAL_BALANCE: Mapping[str, Any] = {"loss": "global_batch", "z_loss": 0.0, "bias_rate": 0.0, "centered_bias": True}
"""Load balance of a Qwen with experts, whose file has only its coefficient."""
UNBALANCED = BalanceConfig("none", 0.0, 0.0, 0.0, centered_bias=True)
"""Load balance of a model whose file does not mention it."""


SCALINGS = ("linear", "llama3", "yarn")  # values of `rope_type`, beside `default`, that have the same names here
YARN_KEYS = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
"""Keys of YaRN that have the same names here."""
LLAMA3_KEYS = ("low_freq_factor", "high_freq_factor")
ORIGINAL = "original_max_position_embeddings"

Rope = TypeVar("Rope", bound=ScaledRope)


def rope_keys(kind: type[ScaledRope], context: Any = REQUIRED) -> Keys:
    """Keys of RoPE that every version of transformers reads; `context` is the default of the longest position."""
    longest = Key("context", default=context, write=lambda model: model.rope.longest(model.context))
    return {
        "max_position_embeddings": longest,
        "rope_theta": Key(
            "rope",
            read=lambda values, fields: read_rope(values, fields["context"], kind),
            write=lambda model: model.rope.theta,
        ),
        "rope_scaling": Key(write=lambda model: rope_scaling(model.rope.resolved(model.context))),
    }


def rope_scaling(rope: PlainRope) -> dict[str, Any] | None:
    """Value to write for `rope_scaling`; None without a context scaling."""
    if not isinstance(rope, ScaledRope) or rope.scaling == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "llama3":
        scaling |= {key: getattr(rope, key) for key in LLAMA3_KEYS}
    else:
        scaling["type"] = rope.scaling  # read by versions that do not know llama3
    if rope.scaling == "yarn":
        scaling |= {key: getattr(rope, key) for key in YARN_KEYS}
        # transformers reads the coefficients together or not at all.
        if not (rope.mscale and rope.mscale_all_dim) and rope.magnitude != magnitude(rope.factor, 1.0):
            scaling["attention_factor"] = rope.magnitude
    if rope.scaling != "linear":
        scaling[ORIGINAL] = rope.original_context
    return scaling


def read_rope(values: Mapping[str, Any], context: int, kind: type[Rope]) -> Rope:
    """Embedding from the keys of a `config.json` with this context. Raises UserError if its scaling is another one."""
    keys = rope_values(values)
    scaling = "none" if keys["rope_type"] == "default" else keys["rope_type"]
    if scaling not in ("none", *SCALINGS):
        raise UserError(f"config.json: we do not have rope scaling {scaling!r}, only default, {', '.join(SCALINGS)}.")
    given: dict[str, Any] = {one.name: one.default for one in fields(ScaledRope) if one.name != "theta"}
    given |= {"scaling": scaling, "original_context": None if kind is ScaledRope else context}
    if scaling != "none":
        original = keys.get(ORIGINAL) or context
        given["factor"] = float(keys.get("factor") or context / original)
        # Their linear scaling has no original context, and most files state the stretched context.
        given["original_context"] = max(1, int(context / given["factor"])) if scaling == "linear" else int(original)
    if scaling == "llama3":
        given |= {key: float(keys[key]) for key in LLAMA3_KEYS}
    if scaling == "yarn":
        given |= {key: float(keys[key]) for key in ("beta_fast", "beta_slow", "mscale_all_dim") if keys.get(key)}
        given |= {"mscale": _mscale(keys, given["factor"]), "truncate": bool(keys.get("truncate", True))}
    return kind(float(keys["rope_theta"]), **given)


def rope_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE keys with `rope_theta` and `rope_type`, which transformers 5 nests and version 4 does not."""
    rope = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    rope["rope_theta"] = rope.get("rope_theta") or values.get("rope_theta") or 10000.0
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    return rope


def _mscale(keys: Mapping[str, Any], factor: float) -> float:
    """Our coefficient at which cosines and sines have the same factor as in transformers."""
    own, all_dim, wanted = keys.get("mscale"), keys.get("mscale_all_dim") or 0.0, keys.get("attention_factor")
    if wanted is None and own and all_dim:
        return float(own)
    if (wanted is None and not all_dim) or factor <= 1:
        return 1.0
    wanted = magnitude(factor, 1.0) if wanted is None else float(wanted)
    mscale = round((wanted * magnitude(factor, all_dim) - 1) / (0.1 * math.log(factor)), 12)
    if mscale < 0:
        raise UserError(f"config.json: attention_factor={wanted:g} must be at least 1.")
    return mscale
