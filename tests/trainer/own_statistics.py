"""A user's model family: Llama whose blocks report statistics of their hidden states."""

from typing import TYPE_CHECKING

from titan_exp.models.llama import STATE_DICTS, Config, huggingface, spec, state_dict_map, violations

if TYPE_CHECKING:
    from titan_exp.models.blocks.transformer import TransformerBlock
    from titan_exp.ops.attention.sdpa import AttentionBackend

__all__ = ["STATE_DICTS", "Config", "block", "huggingface", "spec", "state_dict_map", "violations"]


def block(config: Config, layer: int, backend: "AttentionBackend") -> "TransformerBlock":
    """A block that reports metrics."""
    from tests.trainer.own_statistics_block import ReportingBlock

    return ReportingBlock(spec(config).layers[layer], config.norm_eps, backend)
