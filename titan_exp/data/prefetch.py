"""Items made ahead in a background thread, through a bounded queue.

The thread is told to stop when its owner is closed, collected, or the interpreter exits, and is a daemon: whatever it
waits for can hold up neither.
"""

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")
_PATIENCE_SECONDS = 5.0


class Prefetcher(Iterator[Item]):
    """Iterates over `items` with up to `depth` of them ready. An error in the thread is raised after what it made."""

    def __init__(self, items: Iterator[Item], depth: int) -> None:
        self._queue = _Queue[Item](depth)
        # The thread holds the queue and not this object, so that dropping this object ends the thread.
        thread = threading.Thread(target=_fill, args=(items, self._queue), name="titan_exp-prefetch", daemon=True)
        self.close = weakref.finalize(self, _stop, self._queue, thread)
        """Stops the thread promptly; the second call does nothing."""
        thread.start()

    def __next__(self) -> Item:
        """The next item; StopIteration after the last one or after `close`."""
        return self._queue.get()


class _Queue(Generic[Item]):
    """A bounded queue whose both ends wake up when it is closed. Without items, `get` raises how it ended."""

    def __init__(self, depth: int) -> None:
        self._items: deque[Item] = deque()
        self._depth = depth
        self._ended: BaseException | None = None
        self._changed = threading.Condition()

    def put(self, item: Item) -> bool:
        """Wait for room and append; False once the queue has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended is not None or len(self._items) < self._depth)
            if self._ended is not None:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def get(self) -> Item:
        with self._changed:
            self._changed.wait_for(lambda: self._ended is not None or len(self._items) > 0)
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            assert self._ended is not None
            raise self._ended

    def end(self, how: BaseException, *, drop: bool = False) -> None:
        with self._changed:
            self._ended = self._ended or how
            if drop:
                self._items.clear()
            self._changed.notify_all()


def _fill(items: Iterator[Item], queue: "_Queue[Item]") -> None:
    how: BaseException = StopIteration()
    try:
        for item in items:
            if not queue.put(item):
                break
    except BaseException as error:
        how = error
    queue.end(how)


def _stop(queue: _Queue, thread: threading.Thread) -> None:
    queue.end(StopIteration(), drop=True)
    if thread is not threading.current_thread():
        thread.join(_PATIENCE_SECONDS)
