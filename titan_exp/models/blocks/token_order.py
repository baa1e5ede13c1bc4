"""Identities at which sequence parallelism divides the streams of a sequence, gathers results, and orders positions."""

from jaxtyping import Float
from torch import Tensor, nn

from titan_exp.models.spec.tp_plan import GatheredOrder, GatherResult, ShardTokens

Rope = tuple[Float[Tensor, "batch_or_1 seq 1 half"], Float[Tensor, "batch_or_1 seq 1 half"]]
"""Cosines and sines of positions."""


class TokenShard(nn.Identity):
    """Tokens of a stream that this rank computes between blocks: all, without sequence parallelism."""

    tp_style = ShardTokens()


class ResultGather(nn.Identity):
    """Results of all tokens."""

    tp_style = GatherResult()


class RopeOrder(nn.Module):
    """RoPE caches in the order of the gathered sequence: one stream, then the other, without sequence parallelism."""

    tp_style = GatheredOrder()

    def forward(self, rope: Rope, first_stream: int) -> Rope:
        """Caches of all tokens; the first stream has `first_stream` of this rank's."""
        return rope
