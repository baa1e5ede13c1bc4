"""Context-parallel sequence sharding with head-tail (zigzag) load balancing. Later tokens attend to more keys, so
contiguous parts are unequal work. Of 2 · degree pieces, rank r takes the r-th from the head and the r-th from the tail.
Windows and chunks bend this linear growth: there we cut the sequence, and divide every segment head-tail."""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_exp.config.groups.parallelism import ParallelismConfig
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.ops.attention.mask_pattern import MaskPattern

EVEN = 0.02  # excess of the busiest rank over the mean, as a share of visible keys, below which no cut is needed
GRANULES = (128, 16, 1)  # multiples that piece lengths may have; the first that is even enough is taken

Pieces = tuple[range, ...]  # positions in the sequence of a rank's tokens, in order


def head_tail_pieces(rank: int, degree: int, seq: int, cuts: Sequence[int] = ()) -> Pieces:
    """Head and tail piece of a rank in every segment between cuts."""
    found: list[range] = []  # a compiler traces this function
    edges = (0, *cuts, seq)
    for first, end in itertools.pairwise(edges):
        length, rest = divmod(end - first, 2 * degree)
        assert rest == 0, "checked by the rules"
        found += [range(at, at + length) for at in (first + rank * length, end - (rank + 1) * length)]
    return tuple(found)


def sequence_cuts(spec: ModelSpec | None, parallelism: ParallelismConfig, seq: int) -> tuple[int, ...]:
    """Cuts that balance attention over the ranks that exchange keys and values."""
    degree = parallelism.cp // parallelism.ulysses_degree
    return () if spec is None or degree == 1 or not spec.is_causal else even_cuts(spec.patterns, seq, degree)


def even_cuts(patterns: Collection[MaskPattern], seq: int, degree: int) -> tuple[int, ...]:
    """Fewest cuts, with the coarsest pieces, that balance the visible keys over ranks for every layer's mask. A token
    sees one key more than the one before, up to the window or within its chunk. Over whole chunks head and tail are
    even by symmetry, so one cut before the last, partial chunk is enough."""
    patterns = [pattern.within(seq) for pattern in patterns]
    places = {pattern.window for pattern in patterns if pattern.window is not None}
    places |= {seq - seq % pattern.chunk for pattern in patterns if pattern.chunk is not None}
    candidates = [()] + [_rounded(places, seq, 2 * degree * granule) for granule in GRANULES]
    excess = {cuts: _excess(patterns, seq, degree, cuts) for cuts in candidates}
    return next((cuts for cuts in candidates if excess[cuts] <= EVEN), min(candidates, key=lambda cuts: excess[cuts]))


def _rounded(places: Collection[int], seq: int, multiple: int) -> tuple[int, ...]:
    cuts = {round(place / multiple) * multiple for place in places}
    return tuple(sorted(cut for cut in cuts if 0 < cut < seq))


def _excess(patterns: Collection[MaskPattern], seq: int, degree: int, cuts: tuple[int, ...]) -> float:
    """Excess of visible keys on the busiest rank over the mean, as a share of the mean, for one layer of each mask."""
    shares = [head_tail_pieces(rank, degree, seq, cuts) for rank in range(degree)]
    busiest = sum(max(sum(map(pattern.visible_keys, pieces)) for pieces in shares) for pattern in patterns)
    return busiest * degree / sum(pattern.visible_keys(range(seq)) for pattern in patterns) - 1


@dataclass(frozen=True)
class SequenceShard:
    """One rank's part of every sequence."""

    degree: int
    rank: int
    zigzag: bool
    """True if the part is a piece from the head and one from the tail of each segment; else it is contiguous."""
    cuts: tuple[int, ...] = ()  # positions at which segments end, besides the end of the sequence

    def take(self, whole: Tensor) -> Tensor:
        """This rank's tokens of a tensor [rows, seq, ...]."""
        if self.degree == 1:
            return whole
        if not self.zigzag:
            assert whole.shape[1] % self.degree == 0, "checked by the rules"
            return whole.chunk(self.degree, dim=1)[self.rank].contiguous()
        pieces = head_tail_pieces(self.rank, self.degree, whole.shape[1], self.cuts)
        return torch.cat([whole[:, piece.start : piece.stop] for piece in pieces], dim=1)


@dataclass(frozen=True)
class ShardedSequence:
    """Shard of every sequence for two nested exchanges."""

    across: SequenceShard  # zigzag shard of a group of ranks; groups exchange keys and values
    within: SequenceShard  # contiguous shard inside it; the ranks of a group exchange heads (Ulysses)

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
