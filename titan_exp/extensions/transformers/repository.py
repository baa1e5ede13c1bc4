"""Repository of a model: its `config.json` as OmegaConf resolvers, and the transformers class that it names.

Code of a repository is never executed, and composing a run imports no transformers.
"""

import importlib
import importlib.util
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from titan_exp.config.errors.user_error import UserError, Violation, did_you_mean
from titan_exp.config.foreign_file import read_object
from titan_exp.config.groups.experiment import NO_CHANGE, Change, ModelConfig
from titan_exp.config.hydra.resolve import UnreadableSourceError
from titan_exp.config.torch_features import import_torchao

CONFIG_FILE = "config.json"
HUB_TIMEOUT = 10  # seconds to wait for the hub

REMEDY = "give a folder with a config.json, such as docs/examples/olmo_debug, or a name on the hub: organisation/name"
"""Remedy that names repositories that can be read."""

CONFIG_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"),
    "dim": ("hidden_size", "n_embd", "d_model", "dim", "emb_dim"),
    "vocab_size": ("vocab_size",),
    "context": (
        *("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"),
        *("model_max_length", "context_length"),
    ),
}
"""Names of a size in `config.json`, by our key, because classes differ."""

UNLIMITED = 2**20  # context in tokens of a class without a limit, such as one without positions

OLDEST_VERSION = 5
"""Oldest major version of transformers that has the attention interface and the initialization used here."""

NOT_READ = ("auto_map", "dtype", "quantization_config", "torch_dtype", "transformers_version")
"""Keys of `config.json` that concern neither the class nor its shape."""


def _class_values(config: "Config") -> Mapping[str, Any]:
    """Values that the class reads, including its defaults, without sizes that are fields here and keys that all classes
    have."""
    require_transformers()
    from transformers import PretrainedConfig

    others = {*PretrainedConfig().to_dict(), *(name for names in CONFIG_KEYS.values() for name in names)}
    return {key: value for key, value in class_config(config).to_dict().items() if key not in others - {"model_type"}}


def _change(_: "Config", key: str) -> Change:
    """Kind of change for a key of `config.json`: a new dropout rate may be meant; token ids and initial weights change
    nothing."""
    if "dropout" in key:
        return Change.MEANT
    return Change.NOTHING if key.endswith(("_token_id", ".use_cache", ".initializer_range")) else Change.FUNCTION


@dataclass(frozen=True)
class Config(ModelConfig):
    """A repository's `config.json`, and sizes in place of its own."""

    repository: str = field(metadata=NO_CHANGE)
    """Folder with a `config.json`, or a name on the hub (organisation/name). It is read when the run is composed. Its
    weights are loaded only with `checkpoint.initial=FOLDER`.
    E.g. `model=huggingface model.repository=docs/examples/olmo_debug`."""
    config_overrides: dict[str, Any] = field(hash=False, metadata=NO_CHANGE)
    """Values that replace those in `config.json`.
    E.g. `model=huggingface model.repository=docs/examples/olmo_debug +model.config_overrides.attention_dropout=0.0`."""
    config_json: dict[str, Any] = field(hash=False, metadata={"compared": _class_values, "change": _change})
    """Content of `config.json` with the overrides, which is kept with the run. If it is given here, no folder is read.
    E.g. `model=huggingface model.repository=own model.config_json='{n_layer: 2, n_embd: 8, vocab_size: 9}'`."""
    attention_backend: Literal["auto", "cudnn", "flash", "fa3", "fa4", "efficient", "math", "flex"] = field(
        metadata=NO_CHANGE
    )
    """Attention kernel, as for other families. E.g. `model.attention_backend=flash`."""

    @property
    def has_own_blocks(self) -> bool:
        return False


def repository_config(repository: object, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Content of a repository's `config.json`, with some values replaced. `repository` is a folder, or a name on the
    hub (`organisation/name`), from which only this file is fetched. Raises UnreadableSourceError if there is none."""
    path = _config_file(str(repository))
    try:
        return {**read_object(path), **overrides}
    except UserError as error:
        raise UnreadableSourceError(str(error), REMEDY) from error


def config_size(values: Mapping[str, Any], size: str) -> int:
    """A size in the content of `config.json` (`layers`, `dim`, `vocab_size`, `context`). Raises ValueError if the size
    is missing."""
    names = CONFIG_KEYS[size]
    found = next((values[name] for name in names if values.get(name) is not None), None)
    if found is None and size == "context":
        return UNLIMITED
    if found is None and size == "layers":
        # The longest list of names lists the kinds of layers.
        lists = [value for value in values.values() if isinstance(value, Sequence) and not isinstance(value, str)]
        lengths = (len(names) for names in lists if all(isinstance(name, str) for name in names))
        found = max(lengths, default=0) or None
    if type(found) is not int:
        raise ValueError(f"config.json has no {' or '.join(names)}")
    return found


def _config_file(repository: str) -> Path:
    folder = Path(repository).expanduser()
    file = folder / CONFIG_FILE
    if file.is_file():
        return file
    if folder.is_dir():
        near = sorted(found.parent.name for found in folder.glob(f"*/{CONFIG_FILE}"))
        offer = f"its folder {near[0]} has one: model.repository={folder / near[0]}" if near else REMEDY
        raise UnreadableSourceError("this folder has no config.json", offer)
    if repository.count("/") != 1 or repository.startswith((".", "~", "/")) or folder.parent.is_dir():
        others = folder.parent.iterdir() if folder.parent.is_dir() else ()
        beside = [str(folder.parent / other.name) for other in others if other.is_dir()]
        raise UnreadableSourceError("there is no such folder", did_you_mean(str(folder), beside) or REMEDY)
    return _fetched(repository)


@cache
def _fetched(repository: str) -> Path:
    from huggingface_hub import constants, get_session, hf_hub_download, try_to_load_from_cache

    try:
        if not isinstance(try_to_load_from_cache(repository, CONFIG_FILE), str):
            # Without a network the download itself would try again for a minute.
            get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT)
        return Path(hf_hub_download(repository, CONFIG_FILE))
    except Exception as error:  # the library does not wrap its HTTP client's errors
        reason = str(error).partition("\n")[0]
        raise UnreadableSourceError(
            f"there is no such folder, and the hub has no {CONFIG_FILE} under that name ({reason})", REMEDY
        ) from error


def class_config(config: "Config") -> Any:
    """Build the configuration object of transformers, with our sizes in place of those in `config.json`. Raises
    UserError if transformers is missing, or has no such causal language model."""
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
            # Per-layer lists that the class makes from other keys are in its configuration of all layers.
            made = maker.from_dict(_resized(maker.from_dict(values).to_dict(), config, maker))
        limit = getattr(made, CONFIG_KEYS["context"][0], None)
    except Exception as error:  # its validation may raise anything
        reason = " ".join(str(error).split())
        raise _refusal(
            "model.repository", config.repository, f"transformers refuses its config.json: {reason}"
        ) from error
    if config.context == UNLIMITED and isinstance(limit, int) and 0 < limit < UNLIMITED:
        reason = "its config.json names no context length, and its class has a limit"
        raise _refusal("model.context", config.context, reason, f"use model.context={limit}")
    if type(made) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        reason = f"transformers has no causal language model of model_type {kind!r}"
        raise _refusal("model.repository", config.repository, reason, "give a decoder such as OLMo, Gemma or GPT-NeoX")
    return made


def _layers(values: Mapping[str, Any], config: "Config") -> int:
    """Number of layers in the whole model; ours if `config.json` gives none."""
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
        # Some classes give the number of layers only by lists, and others have no context limit.
        if found.get(name) is not None or (hasattr(maker, own) and number != UNLIMITED):
            found[name] = number
    return found


def _first_layers(value: Any, layers: int, first: int) -> Any:
    """Value of `config.json` that keeps only the entries of the first layers. A list with as many entries as layers has
    one per layer, and a mapping whose keys are numbers goes by layer."""
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
    """Import transformers, after checking that it is installed in a usable version. Raises UserError if it is missing
    or too old."""
    if importlib.util.find_spec("transformers") is None:
        raise _refusal(
            "model.architecture",
            "huggingface",
            "the model's class is in the package transformers, which you have not installed",
            "pip install 'titan_exp[huggingface]', or use a family of titan_exp (model=llama3_8b, model=qwen3_8b, ...)",
        )
    import transformers

    if int(transformers.__version__.partition(".")[0]) < OLDEST_VERSION:
        reason = f"you have transformers {transformers.__version__}, which builds its classes in another way"
        raise _refusal("model.architecture", "huggingface", reason, f"pip install 'transformers>={OLDEST_VERSION}'")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with warnings.catch_warnings(), import_torchao():
        warnings.simplefilter("ignore")  # from other packages that it imports if they exist
        importlib.import_module("transformers.modeling_utils")


def supported_type(values: Mapping[str, Any]) -> str:
    """The `model_type` of a decoder that transformers knows. Raises UserError if transformers is missing, or does not
    know it."""
    require_transformers()
    from transformers import CONFIG_MAPPING

    kind = values.get("model_type")
    if values.get("is_encoder_decoder"):
        reason = f"its config.json is that of an encoder-decoder ({kind}), which reads a second sequence"
        raise _refusal("model.repository", kind, reason, "give a causal language model, which has only a decoder")
    if isinstance(values.get("text_config"), Mapping):
        reason = f"its config.json is that of a model of text with images or sound ({kind})"
        raise _refusal("model.repository", kind, reason, "give the repository of its text model")
    if kind not in CONFIG_MAPPING:
        reason = f"transformers has no class for its model_type, {kind!r}"
        if "auto_map" in values:
            reason += ", and we never execute the code that the repository brings"
        raise _refusal(
            "model.repository",
            kind,
            reason,
            did_you_mean(str(kind), list(CONFIG_MAPPING)) or "pip install -U transformers",
        )
    return str(kind)


def _refusal(key: str, value: object, reason: str, remedy: str = "") -> UserError:
    return UserError("This run cannot start.", [Violation(key, value, reason, remedy)])
