"""Sequence parallelism of two streams in a sequence: each rank holds a part of both between blocks.

Gathered together, tokens come by rank: both streams of the first, then those of the second. Full attention
knows their order by RoPE alone.
"""

import torch
from torch import Tensor, nn

from titan_exp.models.blocks.token_order import Rope
from titan_exp.parallel.tensor_parallel.collectives import TensorParallelGroup


class ShardedTokens(nn.Module):
    """This rank's tokens of whole ones, without a gradient."""

    def __init__(self, region: TensorParallelGroup) -> None:
        super().__init__()
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width] to [batch, seq of this rank, width]."""
        return x.detach().chunk(self.region.degree, dim=1)[self.region.rank].contiguous()


class GatheredResult(nn.Module):
    """Results of all tokens from those of this rank's."""

    def __init__(self, region: TensorParallelGroup) -> None:
        super().__init__()
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq of this rank, width] to [batch, seq, width]."""
        return self.region.gather_result(x)


class GatheredRopeOrder(nn.Module):
    """RoPE caches by rank, from those of the whole first stream, then the second."""

    def __init__(self, region: TensorParallelGroup) -> None:
        super().__init__()
        self.region = region

    def forward(self, rope: Rope, first_stream: int) -> Rope:
        """Caches of all tokens; the first stream has `first_stream` of this rank's."""
        cosines, sines = (self._by_rank(part, first_stream * self.region.degree) for part in rope)
        return cosines, sines

    def _by_rank(self, part: Tensor, first_stream: int) -> Tensor:
        streams = part.split((first_stream, part.shape[1] - first_stream), dim=1)
        of_ranks = [stream.unflatten(1, (self.region.degree, -1)) for stream in streams]
        return torch.cat(of_ranks, dim=2).flatten(1, 2)
