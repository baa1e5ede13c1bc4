"""Context-parallel sequence sharding with head-tail (zigzag) load balancing.

Later tokens see more keys, so contiguous parts of a causal sequence are unequal work. Cut into 2 · degree chunks, of
which rank r takes the r-th from the head and the r-th from the tail, all ranks have the same.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceShard:
    """The part of every sequence that is one rank's."""

    degree: int
    """Ranks that share a sequence."""
    rank: int
    """Which of them this is."""
    zigzag: bool
    """Whether the part is a chunk from the head and one from the tail, else it is contiguous."""

    def take(self, whole: Tensor) -> Tensor:
        """This rank's tokens of a tensor [rows, seq, ...], by position; all of them without context parallelism."""
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
    """A part of what is one part of every sequence."""

    across: SequenceShard
    """The part that a group of ranks has."""
    within: SequenceShard
    """Which of that is this rank's."""

    @property
    def degree(self) -> int:
        """Ranks that share a sequence."""
        return self.across.degree * self.within.degree

    def take(self, whole: Tensor) -> Tensor:
        """This rank's tokens of a tensor [rows, seq, ...], by position; all of them without context parallelism."""
        return self.within.take(self.across.take(whole))

    def positions(self, tokens: Tensor) -> Tensor:
        """Positions in the whole sequence of this rank's tokens, for whole rows `tokens` [rows, seq]."""
        rows, seq = tokens.shape
        return self.take(torch.arange(seq, device=tokens.device).expand(rows, seq))
