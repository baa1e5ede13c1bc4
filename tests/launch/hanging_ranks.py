"""Trainers with a rank that hangs, chosen by TITAN_EXP_RANK_MAIN."""

import ctypes
import os
import signal
import time
from collections.abc import Callable

from titan_exp.launch import watchdog as hang_watch

hang_watch.OTHER_PHASE_FACTOR = 40.0

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from titan_exp.tracking.run_folder.run_folder import RunFolder  # noqa: E402
from titan_exp.trainer import updates as evaluate  # noqa: E402  # noqa: E402
from titan_exp.trainer.rank_main import main  # noqa: E402
from titan_exp.trainer.trainer import Trainer  # noqa: E402

FROM = 2
"""Steps done before the hang."""
LIMIT = 120.0
"""Seconds after which a rank goes on whatever happens, so that no test leaves a process behind."""


def in_the_loader(path: str) -> None:
    _run(path, _await_a_batch)


def once_in_the_loader(path: str) -> None:
    """At the first attempt only."""
    _run(path, _await_a_batch if RunFolder(path).read_attempts()[-1].attempt == 1 else lambda: None)


def stopped(path: str) -> None:
    _run(path, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def in_a_collective(path: str) -> None:
    _run(path, lambda: dist.recv(torch.zeros(1), src=0))


def in_native_code(path: str) -> None:
    """Hang without releasing the GIL, so that no Python thread runs."""

    def sleep() -> None:
        time.sleep(1.0)  # until the watch has looked once more, and knows that this is an ordinary step
        ctypes.PyDLL(None).sleep(int(LIMIT))

    _run(path, sleep)


def slow_evaluation(path: str) -> None:
    """Evaluation whose first batch is slower than the limit of a step, without a hang."""
    original = evaluate.islice
    naps = [float(os.environ["SLOW_SECONDS"])]

    def slowly(*arguments):
        time.sleep(naps.pop() if naps else 0.0)
        return original(*arguments)

    evaluate.islice = slowly  # type: ignore[assignment]
    _run(path, lambda: None)


def _await_a_batch() -> None:
    time.sleep(LIMIT)


def _run(path: str, hang: Callable[[], object]) -> None:
    if os.environ["RANK"] == os.environ["HANGING_RANK"]:
        one_step = Trainer._one_step

        def perhaps(self: Trainer) -> bool:
            if self.step == FROM:
                hang()
            return one_step(self)

        Trainer._one_step = perhaps  # type: ignore[method-assign]
    main(path)
