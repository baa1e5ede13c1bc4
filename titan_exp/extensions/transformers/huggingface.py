"""Any causal language model of transformers: its class's own modules, with our attention kernels, embedding and head.

The class is described by a model on the meta device, when a run is checked; composing a run imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.model import NO_CHANGE, Change, ModelConfig
from titan_exp.config.groups.types import BLOCKS
from titan_exp.config.paths.foreign_file import count
from titan_exp.extensions.transformers.repository import CONFIG_KEYS, config_size
from titan_exp.models.convert.hf_config import ANY_TYPE, HuggingFace
from titan_exp.models.convert.state_dict_map import RowRange, StateDictMap
from titan_exp.models.spec.model_spec import ModelSpec

if TYPE_CHECKING:
    from torch import nn

    from titan_exp.extensions.transformers.decoder import ClassDecoder
    from titan_exp.ops.attention.sdpa import AttentionBackend


def _class_values(config: "Config") -> Mapping[str, Any]:
    """Values that the class reads, with its defaults, without sizes that are fields here and what every class of
    transformers has."""
    from titan_exp.extensions.transformers.repository import class_config, require_transformers

    require_transformers()
    from transformers import PretrainedConfig

    others = {*PretrainedConfig().to_dict(), *(name for names in CONFIG_KEYS.values() for name in names)}
    return {key: value for key, value in class_config(config).to_dict().items() if key not in others - {"model_type"}}


def _change(_: "Config", key: str) -> Change:
    """Another value of a key of `config.json`: a rate of dropout may be meant, ids of tokens and the draw of initial
    weights change nothing."""
    if "dropout" in key:
        return Change.MEANT
    return Change.NOTHING if key.endswith(("_token_id", ".use_cache", ".initializer_range")) else Change.FUNCTION


@dataclass(frozen=True)
class Config(ModelConfig):
    """A repository's `config.json`, and sizes in place of its own."""

    repository: str = field(metadata=NO_CHANGE)
    """Folder with a `config.json`, or a name on the hub (organisation/name); read when the run is composed. Its weights
    are `checkpoint.initial=FOLDER`. E.g. `model=huggingface model.repository=docs/examples/olmo_debug`."""
    config_overrides: dict[str, Any] = field(hash=False, metadata=NO_CHANGE)
    """Values in place of those in `config.json`.
    E.g. `model=huggingface model.repository=docs/examples/olmo_debug +model.config_overrides.attention_dropout=0.0`."""
    config_json: dict[str, Any] = field(hash=False, metadata={"compared": _class_values, "change": _change})
    """Content of `config.json` with the overrides, kept with the run; given here, no folder is read.
    E.g. `model=huggingface model.repository=own model.config_json='{n_layer: 2, n_embd: 8, vocab_size: 9}'`."""
    attention_backend: Literal["auto", "cudnn", "flash", "fa3", "fa4", "efficient", "math", "flex"] = field(
        metadata=NO_CHANGE
    )
    """Attention kernel, as for other families. E.g. `model.attention_backend=flash`."""

    @property
    def has_own_blocks(self) -> bool:
        """False: blocks are those of the class."""
        return False


def spec(config: Config) -> ModelSpec:
    """Spec of the class, read off a model on the meta device."""
    from titan_exp.extensions.transformers.repository import require_transformers

    require_transformers()
    from titan_exp.extensions.transformers.describe import describe

    return describe(config)


@lru_cache(maxsize=256)
def token_mixing(config: Config) -> str | None:
    """Sentence about a module of the class that mixes tokens outside attention, found by a probe."""
    from titan_exp.extensions.transformers.repository import require_transformers

    require_transformers()
    from titan_exp.extensions.transformers.token_mixers import token_mixing

    return token_mixing(config)


def model(config: Config, *, seq_len: int, backend: "AttentionBackend") -> "ClassDecoder":
    """The class as a decoder; its tables of positions are those of `config.json`, whatever `seq_len`."""
    from titan_exp.extensions.transformers.repository import require_transformers
    from titan_exp.models.spec.lookup import model_spec

    require_transformers()
    from titan_exp.extensions.transformers.decoder import ClassDecoder

    described = model_spec(config)
    assert described is not None, "a class has a spec"
    return ClassDecoder(config, described, backend)


def block(config: Config, layer: int, backend: "AttentionBackend") -> "nn.Module":
    """One block of the class, as the whole model calls it."""
    return model(config, seq_len=config.context, backend=backend).blocks[str(layer)]


def state_dict_map(config: Config, form: str) -> StateDictMap:
    """State-dict map from the class's own names, tensor by tensor.

    Raises:
        UserError: a parameter is stacked, whose tensors are kept apart in files.
    """
    import torch

    with torch.device("meta"):
        built = model(config, seq_len=config.context, backend="math")
    shapes = {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
    stacked = next((name for name, shape in shapes.items() if len(shape) > 2), None)
    if stacked is not None:
        raise UserError(
            f"{config.repository}: {stacked} is stacked in memory and kept apart in files, which is not translated. "
            "Runs of this class begin with initial weights, and checkpoint.export=none."
        )
    runs = {name: (RowRange(0, shapes[name][0], theirs, 0),) for name, theirs in built.names.items()}
    their_shapes = {theirs: shapes[name] for name, theirs in built.names.items()}
    # Files of some tied models hold the head as well.
    return StateDictMap(runs, shapes, their_shapes, {}, frozenset({"lm_head.weight"} - {*their_shapes}))


def _to_config_json(config: Config) -> dict[str, Any]:
    from titan_exp.extensions.transformers.repository import class_config, class_name

    made = class_config(config)
    return {**made.to_dict(), "architectures": [class_name(made)]}


def _from_config_json(values: Mapping[str, Any], name: str) -> Config:
    from titan_exp.extensions.transformers.repository import class_config, supported_type

    supported_type(values)
    for key in CONFIG_KEYS["layers"]:  # lists of this length are made of them
        count(values.get(key) or 0, f"config.json: {key}", BLOCKS)
    try:
        sizes = {size: config_size(values, size) for size in CONFIG_KEYS}
    except ValueError as error:
        raise UserError(f"{error}.") from error
    config = Config(
        name=name,
        architecture="huggingface",
        repository=name,
        config_overrides={},
        config_json=dict(values),
        attention_backend="auto",
        **sizes,
    )
    class_config(config)
    return config


huggingface = HuggingFace(
    model_type=ANY_TYPE,
    architectures=(),
    fixed={},
    to_config=_to_config_json,
    from_config=_from_config_json,
    offer="transformers has its class: model=huggingface model.repository=FOLDER trains it.",
)
"""`config.json` of any class; families of our own are asked first."""
