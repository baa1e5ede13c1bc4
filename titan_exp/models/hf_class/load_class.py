"""Model class of transformers from the content of a `config.json`. Code of a repository is never executed."""

import importlib
import importlib.util
import logging
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from titan_exp.config.errors.did_you_mean import did_you_mean
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.hydra.repository_config import CONFIG_KEYS, UNLIMITED, config_size
from titan_exp.ops.import_torchao import import_torchao

if TYPE_CHECKING:
    from titan_exp.models.huggingface import Config

OLDEST_VERSION = 5
"""Oldest major version of transformers with the attention interface and the initialization that are used here."""

NOT_READ = ("auto_map", "dtype", "quantization_config", "torch_dtype", "transformers_version")
"""Keys of `config.json` about other things than the class and its shape."""


def class_config(config: "Config") -> Any:
    """Configuration object of transformers, with our sizes in place of those in `config.json`.

    Raises:
        UserError: transformers is missing, or has no such causal language model.
    """
    kind = supported_type(config.config_json)
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    values = {key: value for key, value in config.config_json.items() if key not in NOT_READ}
    maker, fewer = CONFIG_MAPPING[kind], config.layers < _layers(values, config)
    try:
        try:
            made = maker.from_dict(_resized(values, config, maker))
        except Exception:
            if not fewer:
                raise
            made = None
        if fewer and getattr(made, CONFIG_KEYS["layers"][0], None) != config.layers:
            # Lists by layer that the class makes of other keys are in its configuration of all layers.
            made = maker.from_dict(_resized(maker.from_dict(values).to_dict(), config, maker))
        limit = getattr(made, CONFIG_KEYS["context"][0], None)
    except Exception as error:  # its validation raises what it likes
        reason = " ".join(str(error).split())
        raise _refusal(
            "model.repository", config.repository, f"transformers refuses its config.json: {reason}"
        ) from error
    if config.context == UNLIMITED and isinstance(limit, int) and 0 < limit < UNLIMITED:
        reason = "its config.json names no context length, and its class has a limit of its own"
        raise _refusal("model.context", config.context, reason, f"model.context={limit}")
    if type(made) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        reason = f"transformers has no causal language model of model_type {kind!r}"
        raise _refusal("model.repository", config.repository, reason, "a decoder such as OLMo, Gemma or GPT-NeoX")
    return made


def _layers(values: Mapping[str, Any], config: "Config") -> int:
    """Layers of the whole model; ours if `config.json` says no number."""
    try:
        return config_size(values, "layers")
    except ValueError:
        return config.layers


def _resized(values: Mapping[str, Any], config: "Config", maker: Any) -> dict[str, Any]:
    """Content of `config.json` with our sizes, for a class of configurations."""
    layers = _layers(values, config)
    found = {key: _first_layers(value, layers, config.layers) for key, value in values.items()}
    for size in ("layers", "vocab_size", "context"):
        names, number = CONFIG_KEYS[size], getattr(config, size)
        own = (getattr(maker, "attribute_map", None) or {}).get(names[0], names[0])
        name = next((name for name in (own, *names) if found.get(name) is not None), own)
        # Lists alone tell the layers of some classes, and others have no limit of the context.
        if found.get(name) is not None or (hasattr(maker, own) and number != UNLIMITED):
            found[name] = number
    return found


def _first_layers(value: Any, layers: int, first: int) -> Any:
    """A value of `config.json` without its entries of layers after the first ones.

    A list of as many entries as there are layers has one for each, and a mapping whose keys are numbers is by layer.
    """
    if isinstance(value, Mapping) and value and all(str(key).isdecimal() for key in value):
        return {key: part for key, part in value.items() if int(key) < first}
    return value[:first] if isinstance(value, list | tuple) and len(value) == layers else value


def build_class(config: "Config", attention: str) -> Any:
    """Model of transformers in fp32 on the current default device, with an attention implementation by name."""
    made = class_config(config)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(made, torch_dtype="float32", attn_implementation=attention)


def class_name(made: Any) -> str:
    """Name of the causal language model of a configuration object."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    found: type = MODEL_FOR_CAUSAL_LM_MAPPING[type(made)]  # type: ignore[assignment]
    return found.__name__


def require_transformers() -> None:
    """Import transformers, after a check that it is installed in a version that can be used.

    Raises:
        UserError: it is missing or too old.
    """
    if importlib.util.find_spec("transformers") is None:
        raise _refusal(
            "model.architecture",
            "huggingface",
            "the package transformers, which has the model's class, is not installed",
            "pip install 'titan_exp[huggingface]', or a family of titan_exp (model=llama3_8b, qwen3_8b, ...)",
        )
    import transformers

    if int(transformers.__version__.partition(".")[0]) < OLDEST_VERSION:
        reason = f"transformers {transformers.__version__} is installed, and its classes are built otherwise"
        raise _refusal("model.architecture", "huggingface", reason, f"pip install 'transformers>={OLDEST_VERSION}'")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with warnings.catch_warnings(), import_torchao():
        warnings.simplefilter("ignore")  # of other packages that it imports if they are there
        importlib.import_module("transformers.modeling_utils")


def supported_type(values: Mapping[str, Any]) -> str:
    """The `model_type` of a decoder that transformers knows.

    Raises:
        UserError: transformers is missing, or does not know it.
    """
    require_transformers()
    from transformers import CONFIG_MAPPING

    kind = values.get("model_type")
    if values.get("is_encoder_decoder"):
        reason = f"its config.json is that of an encoder-decoder ({kind}), which predicts from a second sequence"
        raise _refusal("model.repository", kind, reason, "a causal language model: one with a decoder alone")
    if isinstance(values.get("text_config"), Mapping):
        reason = f"its config.json is that of a model of images or sound and text ({kind})"
        raise _refusal("model.repository", kind, reason, "the repository of its text model")
    if kind not in CONFIG_MAPPING:
        reason = f"transformers has no class for its model_type, {kind!r}"
        if "auto_map" in values:
            reason += "; the repository brings code of its own, which is never executed"
        raise _refusal(
            "model.repository",
            kind,
            reason,
            did_you_mean(str(kind), list(CONFIG_MAPPING)) or "pip install -U transformers",
        )
    return str(kind)


def _refusal(key: str, value: object, reason: str, remedy: str = "") -> UserError:
    return UserError("This run cannot be started.", [Violation(key, value, reason, remedy)])
