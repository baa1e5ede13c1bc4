"""Child processes that end with their parent, even when it is killed."""

import multiprocessing
import os
from multiprocessing.connection import wait
from threading import Thread


def end_with_parent() -> None:
    """End this process when its parent ends.

    Without it, workers of a killed process pool finish their current work, which may take minutes.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a child process"

    def watch_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)

    Thread(target=watch_parent, daemon=True).start()
