"""A user's model family: Llama whose blocks report statistics of their hidden states."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan_exp.models import llama
from titan_exp.models.llama import STATE_DICTS, huggingface, spec, state_dict_map, violations

if TYPE_CHECKING:
    from titan_exp.models.blocks.transformer import TransformerBlock
    from titan_exp.ops.attention.sdpa import AttentionBackend

__all__ = ["STATE_DICTS", "Config", "block", "huggingface", "spec", "state_dict_map", "violations"]


@dataclass(frozen=True)
class Config(llama.Config):
    """Shape of a Llama, and what its blocks report."""

    statistics: bool = True
    """True if they report statistics."""


def block(config: Config, layer: int, backend: "AttentionBackend") -> "TransformerBlock":
    """A block that reports metrics."""
    from tests.trainer.own_statistics_block import ReportingBlock
    from titan_exp.models.blocks.transformer import TransformerBlock

    kind = ReportingBlock if config.statistics else TransformerBlock
    return kind(spec(config).layers[layer], config.norm_eps, backend)
