"""Plain class as a model: your class, called with its config and options, without a spec."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from titan_exp.config.schema.component import Call, import_callable
from titan_exp.models import llama

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Config(llama.Config):
    """Fields of a Llama for your class to read, and its own keyword arguments."""

    options: dict[str, Any] = field(default_factory=dict, hash=False)
    """Keyword arguments for an architecture of your own."""


def spec(config: Config) -> None:
    """None, since a plain class describes neither layers nor sharding."""


def model(config: Config, *, seq_len: int, backend: object) -> "nn.Module":
    """Call the class as `Class(config, **config.options)`. Its `forward(tokens, positions, documents)` returns logits.
    Blocks in a `ModuleDict` named `blocks` are sharded, recomputed and compiled one by one."""
    call = Call(("config",), (), "model.options", config.options)
    return import_callable(config.architecture, "model.architecture", call)(config, **config.options)
