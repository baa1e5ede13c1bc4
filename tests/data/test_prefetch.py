import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from titan_exp.data.train_loader import Prefetcher


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "titan_exp-prefetch"]


def counting(made: list[int], reached: threading.Event, until: int) -> Iterator[int]:
    for number in range(1_000_000):
        made.append(number)
        if number == until:
            reached.set()
        yield number


def test_items_come_in_order_and_end():
    prefetcher = Prefetcher(iter(range(50)), 3)
    assert list(prefetcher) == list(range(50))
    assert next(prefetcher, None) is None


def test_prefetch_is_bounded_by_the_depth():
    made, reached = [], threading.Event()
    prefetcher = Prefetcher(counting(made, reached, until=3), 3)
    assert reached.wait(10)  # three are ready, and the fourth waits for room
    assert len(made) == 4
    assert [next(prefetcher) for _ in range(10)] == list(range(10))
    prefetcher.close()
    assert len(made) <= 14


def test_an_exception_is_raised_after_the_items_before_it_and_again():
    def failing() -> Iterator[int]:
        yield 1
        raise FileNotFoundError("gone")

    prefetcher = Prefetcher(failing(), 4)
    assert next(prefetcher) == 1
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match="gone"):
            next(prefetcher)


def test_close_ends_the_thread_and_wakes_consumers():
    stuck, released = threading.Event(), threading.Event()

    def waiting() -> Iterator[int]:
        yield 0
        stuck.set()
        released.wait(10)
        yield 1

    prefetcher = Prefetcher(waiting(), 1)
    assert next(prefetcher) == 0
    assert stuck.wait(10)
    waiter = threading.Thread(target=lambda: next(prefetcher, None))
    waiter.start()
    threading.Timer(0.05, released.set).start()
    prefetcher.close()
    waiter.join(10)
    assert not waiter.is_alive()
    assert not prefetch_threads()
    prefetcher.close()


def test_iteration_stops_after_close():
    prefetcher = Prefetcher(iter(range(50)), 3)
    assert next(prefetcher) == 0
    prefetcher.close()
    assert next(prefetcher, None) is None


def test_a_dropped_prefetcher_ends_its_thread():
    made, reached = [], threading.Event()
    prefetcher = Prefetcher(counting(made, reached, until=1), 1)
    assert reached.wait(10)
    gone = weakref.ref(prefetcher)
    del prefetcher
    gc.collect()
    assert gone() is None
    assert not prefetch_threads()
