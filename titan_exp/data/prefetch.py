"""Background prefetching of an iterator through a bounded queue.

The daemon thread stops when its owner is closed or garbage-collected, or the interpreter exits; a blocked read delays
none of these.
"""

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")
_JOIN_TIMEOUT_SECONDS = 5.0


class Prefetcher(Iterator[Item]):
    """Iterator over `items` with up to `depth` items prefetched; the thread's exception is raised after its items."""

    def __init__(self, items: Iterator[Item], depth: int) -> None:
        self._queue = _Queue[Item](depth)
        # The thread references only the queue, so that dropping this object ends the thread.
        thread = threading.Thread(target=_fill, args=(items, self._queue), name="titan_exp-prefetch", daemon=True)
        self.close = weakref.finalize(self, _stop, self._queue, thread)
        """Stop the thread; idempotent."""
        thread.start()

    def __next__(self) -> Item:
        """Next item; StopIteration after the last one or after `close`."""
        return self._queue.get()


class _Queue(Generic[Item]):
    """Bounded queue; `end` wakes producer and consumer, and `get` on an empty ended queue raises the end reason."""

    def __init__(self, depth: int) -> None:
        self._items: deque[Item] = deque()
        self._depth = depth
        self._end_reason: BaseException | None = None
        self._changed = threading.Condition()

    def put(self, item: Item) -> bool:
        """Wait for space and append; returns False once the queue has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._end_reason is not None or len(self._items) < self._depth)
            if self._end_reason is not None:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def get(self) -> Item:
        with self._changed:
            self._changed.wait_for(lambda: self._end_reason is not None or len(self._items) > 0)
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            assert self._end_reason is not None
            raise self._end_reason

    def end(self, reason: BaseException, *, drop_items: bool = False) -> None:
        with self._changed:
            self._end_reason = self._end_reason or reason
            if drop_items:
                self._items.clear()
            self._changed.notify_all()


def _fill(items: Iterator[Item], queue: "_Queue[Item]") -> None:
    reason: BaseException = StopIteration()
    try:
        for item in items:
            if not queue.put(item):
                break
    except BaseException as error:
        reason = error
    queue.end(reason)


def _stop(queue: _Queue, thread: threading.Thread) -> None:
    queue.end(StopIteration(), drop_items=True)
    if thread is not threading.current_thread():
        thread.join(_JOIN_TIMEOUT_SECONDS)
