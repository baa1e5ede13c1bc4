"""More stand-ins for the trainer, beside those of tests/launch/fake_ranks.py."""

import signal
import sys
import time


def stop_always(path: str) -> None:
    """Saves and stops whenever it is started."""
    sys.exit(85)


def hang(path: str) -> None:
    """Hangs where no handler of Python's runs."""
    open(f"{path}/hanging", "w").close()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    time.sleep(120)
