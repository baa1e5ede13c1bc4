"""A process that works for another one, and does not outlive it, however that ends."""

import multiprocessing
import os
from multiprocessing.connection import wait
from threading import Thread


def end_with_parent() -> None:
    """End this process as soon as the one that started it has ended; killed, that tells nobody.

    A pool's own processes wait for work from each other then, and would go on with what they have for minutes.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a process that another one has started"

    def follow() -> None:
        wait([parent.sentinel])
        os._exit(1)

    Thread(target=follow, daemon=True).start()
