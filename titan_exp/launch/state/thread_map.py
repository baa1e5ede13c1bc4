"""Thread-pool map over run folders; hides disk latency."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

WAITING = 16


def thread_map(do: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Results of `do` for each item, in order; raises the first exception once all are done. Items must share
    nothing."""
    with ThreadPoolExecutor(WAITING) as pool:
        return list(pool.map(do, items))
