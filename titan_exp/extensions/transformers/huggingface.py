"""Any causal language model of transformers: the class's own modules, with our attention kernels, embedding and head.

When a run is checked, a model on the meta device describes the class. Composing a run imports no torch.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.foreign_file import count
from titan_exp.config.groups.types import BLOCKS
from titan_exp.extensions.transformers import repository
from titan_exp.extensions.transformers.repository import CONFIG_KEYS, Config, config_size
from titan_exp.models.convert.hf_config import ANY_TYPE, HuggingFace
from titan_exp.models.convert.state_dict_map import RowRange, StateDictMap
from titan_exp.models.spec.lookup import model_spec
from titan_exp.models.spec.model_spec import ModelSpec

if TYPE_CHECKING:
    from torch import nn

    from titan_exp.extensions.transformers.decoder import ClassDecoder
    from titan_exp.ops.attention.sdpa import AttentionBackend


def spec(config: Config) -> ModelSpec:
    """Spec of the class, read from a model on the meta device."""
    repository.require_transformers()
    from titan_exp.extensions.transformers.describe import describe

    return describe(config)


@lru_cache(maxsize=256)
def token_mixing(config: Config) -> str | None:
    """Sentence about a module of the class that mixes tokens outside attention, found by a probe."""
    repository.require_transformers()
    from titan_exp.extensions.transformers.describe import token_mixing

    return token_mixing(config)


def model(config: Config, *, seq_len: int, backend: "AttentionBackend") -> "ClassDecoder":
    """Build the class as a decoder. Its position tables follow `config.json`, whatever `seq_len` is."""
    repository.require_transformers()
    from titan_exp.extensions.transformers.decoder import ClassDecoder

    described = model_spec(config)
    assert described is not None, "a class has a spec"
    return ClassDecoder(config, described, backend)


def block(config: Config, layer: int, backend: "AttentionBackend") -> "nn.Module":
    """Build one block of the class, as the whole model calls it."""
    return model(config, seq_len=config.context, backend=backend).blocks[str(layer)]


def state_dict_map(config: Config, form: str) -> StateDictMap:
    """State-dict map from the class's own names, tensor by tensor. Raises UserError if a parameter is stacked, while
    its tensors are separate in files."""
    import torch

    with torch.device("meta"):
        built = model(config, seq_len=config.context, backend="math")
    shapes = {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
    stacked = next((name for name, shape in shapes.items() if len(shape) > 2), None)
    if stacked is not None:
        raise UserError(
            f"{config.repository}: the class stacks {stacked} in memory, and files hold its parts. We cannot translate "
            "that, so start from initial weights (checkpoint.initial=null) and do not export (checkpoint.export=none)."
        )
    runs = {name: (RowRange(0, shapes[name][0], theirs, 0),) for name, theirs in built.names.items()}
    their_shapes = {theirs: shapes[name] for name, theirs in built.names.items()}
    # Files of some tied models hold the head as well.
    return StateDictMap(runs, shapes, their_shapes, {}, frozenset({"lm_head.weight"} - {*their_shapes}))


def _to_config_json(config: Config) -> dict[str, Any]:
    made = repository.class_config(config)
    return {**made.to_dict(), "architectures": [repository.class_name(made)]}


def _from_config_json(values: Mapping[str, Any], name: str) -> Config:
    repository.supported_type(values)
    for key in CONFIG_KEYS["layers"]:  # lists of this length are built from it
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
    repository.class_config(config)
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
