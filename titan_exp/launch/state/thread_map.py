"""Thread-pool map over run folders; hides disk latency."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

WAITING = 16


def thread_map(do: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Apply `do` to each item in a thread pool; returns results in order or raises the first exception. Calls must not
    share state."""
    with ThreadPoolExecutor(WAITING) as pool:
        return list(pool.map(do, items))
