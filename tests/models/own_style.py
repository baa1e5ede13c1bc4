"""A Llama with a norm over all heads before its output projection, sharded by a style of its own."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan_exp.models import llama
from titan_exp.models.llama import spec, violations
from titan_exp.models.spec.tp_plan import TPStyle

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Config", "block", "spec", "violations"]


@dataclass(frozen=True)
class AllHeads(TPStyle):
    """A module between the heads of all ranks, of which each rank goes on with its own."""

    features: int
    """Features of all heads."""


@dataclass(frozen=True)
class Config(llama.Config):
    """Shape of a Llama, and whether its style has a handler."""

    handled: bool


def block(config: Config, layer: int, backend: Any) -> "nn.Module":
    """A Llama's block with the norm."""
    from tests.models.own_head_norm_block import normed_block
    from titan_exp.parallel.tensor_parallel.styles import MODULES

    found = normed_block(spec(config).layers[layer], config.norm_eps, backend)
    found.attention.whole.tp_style = AllHeads(config.heads * config.head_dim)  # type: ignore[union-attr]  # a module
    if config.handled:
        MODULES[AllHeads] = _gather_and_split
    return found


def _gather_and_split(style: AllHeads, part: Any) -> None:
    part.module.register_forward_pre_hook(lambda _, args: (part.region.gather_outputs(args[0], style.features),))
    part.module.register_forward_hook(lambda _, args, out: part.region.split_inputs(out))
