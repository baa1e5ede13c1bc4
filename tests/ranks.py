"""A warm pool of ranks: jobs of several processes that start in a fraction of a second.

A fork server imports torch and the trainer once; every rank is forked from it. It is started with one OpenMP thread,
because a process whose threads have run cannot be forked safely.
"""

import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

PRELOAD = ["torch.distributed.tensor", "titan_exp.models.build"]


def run_ranks(world: int, job: Callable[..., Any], *args: Any, limit: float = 120.0) -> list[Any]:
    """Run `job(*args)` on `world` ranks, `RANK` and the like set, and return what each of them returned.

    The process group is the job's to join. Raises AssertionError with the first traceback where a rank fails, and
    kills every rank of the job where one fails or the limit in seconds is over.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            receive, send = context.Pipe(duplex=False)
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "TITAN_EXP_RENDEZVOUS": str(Path(folder) / "meet"),
                "GLOO_SOCKET_IFNAME": "lo",
            }
            process = context.Process(target=_rank, args=(send, environment, job, args))
            process.start()
            send.close()
            pipes.append(receive)
            processes.append(process)
        try:
            return _collect(pipes, time.monotonic() + limit)
        finally:
            for process in processes:
                process.join(timeout=5.0)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes: list[Any], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for index, pipe in enumerate(pipes) if index not in results]
        ready = multiprocessing.connection.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise AssertionError(f"ranks {sorted(set(range(len(pipes))) - set(results))} did not finish in time")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                failed, value = pipe.recv()
            except EOFError:
                raise AssertionError(f"rank {rank} died without a word") from None
            if failed:
                raise AssertionError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank(send: Any, environment: dict[str, str], job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    try:
        send.send((False, job(*args)))
    except BaseException:
        send.send((True, traceback.format_exc()))
    finally:
        send.close()
