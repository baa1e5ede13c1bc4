import threading
from concurrent.futures import CancelledError

import pytest

from titan_exp.data.virtual_shards.thread_pool import DaemonThreadPool


def test_tasks_run_and_errors_arrive():
    pool = DaemonThreadPool(2)
    futures = [pool.submit(lambda number=number: number**2) for number in range(20)]
    assert [future.result(timeout=10) for future in futures] == [number**2 for number in range(20)]
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 // 0).result(timeout=10)
    pool.close()


def test_close_cancels_what_waits_and_tells_what_runs():
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


def test_its_last_user_may_be_one_of_its_threads():
    pool = DaemonThreadPool(2)
    go = threading.Event()
    holder = [pool]
    future = pool.submit(lambda: (go.wait(10), holder.clear()))
    del pool
    go.set()
    future.result(timeout=10)
