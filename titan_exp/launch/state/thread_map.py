"""Thread-pool map over run folders; hides disk latency."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

WAITING = 16
"""Folders that wait for the disk at a time."""


def thread_map(do: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Results of `do` for each item, in order; `do` mostly waits, and items share nothing.

    Raises:
        Exception: what `do` raised first, in the order of the items, when all are done.
    """
    with ThreadPoolExecutor(WAITING) as pool:
        return list(pool.map(do, items))
