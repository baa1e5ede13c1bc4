import threading
from concurrent.futures import CancelledError

import pytest

from titan_exp.data.virtual_shards import DaemonThreadPool


def test_futures_return_results_and_exceptions():
    pool = DaemonThreadPool(2)
    futures = [pool.submit(lambda number=number: number**2) for number in range(20)]
    assert [future.result(timeout=10) for future in futures] == [number**2 for number in range(20)]
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 // 0).result(timeout=10)
    pool.close()


def test_close_cancels_queued_tasks_and_notifies_running_ones():
    pool = DaemonThreadPool(1)
    running = threading.Event()

    def endless() -> None:
        running.set()
        while True:
            pool.check_open()

    first, second = pool.submit(endless), pool.submit(lambda: 1)
    assert running.wait(10)
    pool.close()
    for future in (first, second, pool.submit(lambda: 1)):
        with pytest.raises(CancelledError):
            future.result(timeout=10)
    pool.close()


def test_the_last_reference_may_be_held_by_a_worker():
    pool = DaemonThreadPool(2)
    go = threading.Event()
    holder = [pool]
    future = pool.submit(lambda: (go.wait(10), holder.clear()))
    del pool
    go.set()
    future.result(timeout=10)
