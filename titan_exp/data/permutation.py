"""A shuffled range that takes no memory: any element of it can be asked for at once, on every machine the same.

A generalized Feistel network over a grid just larger than the range, walked until it lands inside (Black and Rogaway
2002, "Ciphers with arbitrary finite domains"). Unlike a library's shuffle it can never change between versions.
"""

import math
import struct
from hashlib import blake2b

_ROUNDS = 8


class Permutation:
    """A bijection of `range(size)` onto itself, a pure function of `size` and `key`."""

    def __init__(self, size: int, *key: object) -> None:
        assert size >= 1
        self.size = size
        self._rows = math.isqrt(size - 1) + 1
        self._columns = -(-size // self._rows)
        self._key = blake2b("/".join(map(str, key)).encode(), digest_size=32).digest()

    def __getitem__(self, index: int) -> int:
        """Where `index` goes."""
        assert 0 <= index < self.size
        while True:
            index = self._once(index)
            if index < self.size:
                return index

    def _once(self, index: int) -> int:
        row, column = divmod(index, self._columns)
        for number in range(0, _ROUNDS, 2):
            row = (row + self._mix(number, column)) % self._rows
            column = (column + self._mix(number + 1, row)) % self._columns
        return row * self._columns + column

    def _mix(self, number: int, value: int) -> int:
        digest = blake2b(struct.pack("<BQ", number, value), key=self._key, digest_size=8).digest()
        return int.from_bytes(digest, "little")
