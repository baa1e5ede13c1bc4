"""The order of a corpus's items (documents, or parts of a stream) in each epoch: a pure function of seed and epoch.

Nothing is stored and nothing is exchanged: every virtual shard looks its own places up.
"""

from functools import lru_cache

from titan_exp.data.permutation import Permutation


class EpochShuffle:
    """The shuffled order of `items` items in any epoch."""

    def __init__(self, items: int, seed: int) -> None:
        self.items = items
        # Shards reach the end of an epoch at different times, so a few epochs are in use together.
        self._epoch = lru_cache(maxsize=8)(lambda epoch: Permutation(items, "order", seed, epoch))

    def item(self, epoch: int, place: int) -> int:
        """The item at `place`, which wraps around."""
        return self._epoch(epoch)[place % self.items]
