"""Sequence parallelism of text and image tokens: each rank holds a part of both between blocks.

Gathered together, tokens come by rank: text and image tokens of the first, then those of the second. Full attention
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
    """RoPE caches by rank, from those of all text tokens, then all image tokens."""

    def __init__(self, region: TensorParallelGroup) -> None:
        super().__init__()
        self.region = region

    def forward(self, rope: Rope, text_tokens: int) -> Rope:
        """Caches of all tokens; `text_tokens` are this rank's."""
        cosines, sines = (self._by_rank(part, text_tokens * self.region.degree) for part in rope)
        return cosines, sines

    def _by_rank(self, part: Tensor, text_tokens: int) -> Tensor:
        streams = part.split((text_tokens, part.shape[1] - text_tokens), dim=1)
        of_ranks = [stream.unflatten(1, (self.region.degree, -1)) for stream in streams]
        return torch.cat(of_ranks, dim=2).flatten(1, 2)
