"""Context-parallel sequence sharding with head-tail (zigzag) load balancing.

Later tokens attend to more keys, so contiguous parts are unequal work. Of 2 · degree chunks, rank r takes the r-th from
the head and the r-th from the tail.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceShard:
    """One rank's part of every sequence."""

    degree: int
    """Number of parts."""
    rank: int
    """Index of this part."""
    zigzag: bool
    """True if the part is a chunk from the head and one from the tail; else it is contiguous."""

    def take(self, whole: Tensor) -> Tensor:
        """This rank's tokens of a tensor [rows, seq, ...]."""
        if self.degree == 1:
            return whole
        if not self.zigzag:
            assert whole.shape[1] % self.degree == 0, "checked by the rules"
            return whole.chunk(self.degree, dim=1)[self.rank].contiguous()
        assert whole.shape[1] % (2 * self.degree) == 0, "checked by the rules"
        chunks = whole.chunk(2 * self.degree, dim=1)
        return torch.cat((chunks[self.rank], chunks[2 * self.degree - 1 - self.rank]), dim=1)


@dataclass(frozen=True)
class ShardedSequence:
    """A shard within a shard of every sequence."""

    across: SequenceShard
    """Zigzag shard of a group of ranks, among which keys and values are exchanged."""
    within: SequenceShard
    """Contiguous shard inside it, among which heads are exchanged (Ulysses)."""

    @property
    def degree(self) -> int:
        """Number of ranks that share a sequence."""
        return self.across.degree * self.within.degree

    def take(self, whole: Tensor) -> Tensor:
        """This rank's tokens of a tensor [rows, seq, ...]."""
        return self.within.take(self.across.take(whole))

    def positions(self, tokens: Tensor) -> Tensor:
        """Positions of this rank's tokens in the whole sequence, for `tokens` [rows, seq]."""
        rows, seq = tokens.shape
        return self.take(torch.arange(seq, device=tokens.device).expand(rows, seq))
