"""A warm pool of ranks: jobs of several processes that start in a fraction of a second.

A fork server imports torch and the trainer once; every rank is forked from it. It is started with one OpenMP thread,
because a process whose threads have run cannot be forked safely.
"""

import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

PRELOAD = [
    "torch.distributed.checkpoint",
    "titan_exp.trainer.trainer",
    "titan_exp.optim.adamw",
    "tests.parity.runs",
    "tests.warm",
]
"""A rank would spend more time importing these than training."""


def run_ranks(world: int, job: Callable[..., Any], *args: Any, limit: float = 120.0) -> list[Any]:
    """Run `job(*args)` on `world` ranks and return what each of them returned.

    Raises AssertionError with the first traceback where a rank fails, and kills every rank where one fails or the
    limit in seconds is over.
    """
    ranks = Ranks(world, job, *args)
    try:
        return ranks.results(limit)
    finally:
        ranks.kill()


class Ranks:
    """A running job, `RANK` and the like set in each process. The process group is the job's to join."""

    def __init__(self, world: int, job: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        for rank in range(world):
            receive, send = context.Pipe(duplex=False)
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "TITAN_EXP_RENDEZVOUS": str(Path(self._folder.name) / "meet"),
                "GLOO_SOCKET_IFNAME": "lo",
            }
            process = context.Process(target=_rank, args=(send, environment, job, args))
            process.start()
            send.close()
            self._pipes.append(receive)
            self._processes.append(process)

    def alive(self) -> bool:
        """Whether any rank still runs."""
        return any(process.is_alive() for process in self._processes)

    def kill(self) -> None:
        """End every rank at once, as `kill -9` does, and forget the job."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def results(self, limit: float, progress: Callable[[], Any] = lambda: None) -> list[Any]:
        """Wait, at most `limit` seconds since `progress()` has changed, and return what each rank returned."""
        seen, deadline = progress(), time.monotonic() + limit
        results: dict[int, Any] = {}
        while len(results) < len(self._pipes):
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            left = max(0.0, deadline - time.monotonic())
            ready = multiprocessing.connection.wait(waiting, timeout=min(1.0, left))
            if (now := progress()) != seen:
                seen, deadline = now, time.monotonic() + limit
            elif not ready and not left:
                raise AssertionError(f"ranks {sorted(set(range(len(self._pipes))) - set(results))} did not finish")
            for rank in [rank for rank, pipe in enumerate(self._pipes) if pipe in ready]:
                try:
                    failed, value = pickle.loads(self._pipes[rank].recv_bytes())
                except EOFError:
                    raise AssertionError(f"rank {rank} died without a word") from None
                if failed:
                    raise AssertionError(f"rank {rank} failed:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(len(self._pipes))]


def _rank(send: Any, environment: dict[str, str], job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    try:
        outcome = (False, job(*args))
    except BaseException:
        outcome = (True, traceback.format_exc())
    # Plain pickle copies tensors; a connection would share memory that dies with this process.
    send.send_bytes(pickle.dumps(outcome))
    send.close()
