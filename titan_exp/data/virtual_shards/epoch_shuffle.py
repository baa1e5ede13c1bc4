"""Epoch shuffling: stateless permutation of a corpus's items (documents or stream parts) by seed and epoch."""

from functools import lru_cache

from titan_exp.data.permutation import Permutation


class EpochShuffle:
    """Shuffled order of `items` items in every epoch."""

    def __init__(self, items: int, seed: int) -> None:
        self.items = items
        # Shards reach the end of an epoch at different times, so that a few epochs are in use simultaneously.
        self._epoch = lru_cache(maxsize=8)(lambda epoch: Permutation(items, "order", seed, epoch))

    def item(self, epoch: int, rank: int) -> int:
        """Item at `rank` (modulo the number of items) of the epoch's order."""
        return self._epoch(epoch)[rank % self.items]
