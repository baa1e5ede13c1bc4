"""Random orders and numbers by key."""

import math
import struct
from hashlib import blake2b

import numpy as np

_ROUNDS = 8


class Permutation:
    """Pseudorandom bijection of `range(size)`, a pure function of `size` and `key`."""

    def __init__(self, size: int, *key: object) -> None:
        assert size >= 1
        self.size = size
        self._rows = math.isqrt(size - 1) + 1
        self._columns = -(-size // self._rows)
        self._key = blake2b("/".join(map(str, key)).encode(), digest_size=32).digest()

    def __getitem__(self, index: int) -> int:
        """Image of `index`."""
        assert 0 <= index < self.size
        while True:
            index = self._encrypt(index)
            if index < self.size:
                return index

    def _encrypt(self, index: int) -> int:
        row, column = divmod(index, self._columns)
        for round_ in range(0, _ROUNDS, 2):
            row = (row + self._round(round_, column)) % self._rows
            column = (column + self._round(round_ + 1, row)) % self._columns
        return row * self._columns + column

    def _round(self, round_: int, value: int) -> int:
        digest = blake2b(struct.pack("<BQ", round_, value), key=self._key, digest_size=8).digest()
        return int.from_bytes(digest, "little")


def keyed_generator(seed: int, sample: int, purpose: str) -> np.random.Generator:
    """Generator of one sample's numbers for one purpose; those of other samples and purposes are independent."""
    digest = blake2b(f"{seed}/{sample}/{purpose}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
