"""Ranks of a layout check: the trainer's own build and step in fp64, on processes forked from one that imported torch.

`in_double` comes before any other import that may read a dtype of torch: afterwards every floating dtype that Python
code names is fp64, in forward, backward and recomputation, in bodies of custom operators, and in your code.
"""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch

from titan_exp.doctor.layout.cases import MOST_RANKS, Case

RANK_SECONDS = 30.0
"""Seconds that a case may take from the start of its ranks on."""
FORK = multiprocessing.get_context("fork")


def in_double() -> None:
    """Let every floating dtype of torch be fp64 in this process. Call it before other modules are imported."""
    torch.set_default_dtype(torch.float64)
    for name in ("float32", "float", "bfloat16", "float16", "half"):
        setattr(torch, name, torch.float64)
    for name in ("float", "bfloat16", "half"):
        setattr(torch.Tensor, name, torch.Tensor.double)


@dataclass
class Recorded:
    """Numbers of a case, put together from all of its ranks."""

    losses: list[float] = field(default_factory=list)
    """Loss of each step."""
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    """Whole gradient of each parameter in the first step, in the order of the model."""
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    """Whole parameters and persistent buffers after the last step."""
    outputs: dict[str, tuple[int, str, np.ndarray]] = field(default_factory=dict)
    """Each module's first output in the first step, as in `steps.Output`, in forward order."""
    disputed: list[str] = field(default_factory=list)
    """Names of parameters and buffers of which ranks hold different values after the last step."""


def record(cases: Sequence[Case], deadline: float) -> Iterator[tuple[Case, Recorded | str]]:
    """Numbers of each case, or a sentence why there are none, in the order in which they end; at most `MOST_RANKS`
    processes run at a time, until the deadline on the monotonic clock."""
    from titan_exp.doctor.layout.steps import train_steps

    waiting, running = deque(cases), list[tuple[Case, _Running]]()
    try:
        while waiting or running:
            busy = sum(case.ranks for case, _ in running)
            while waiting and busy + waiting[0].ranks <= MOST_RANKS:
                case = waiting.popleft()
                running.append((case, _Running(case.ranks, train_steps, case.experiment)))
                busy += case.ranks
            wait([pipe for _, one in running for pipe in one.missing.values()], timeout=1.0)
            for case, one in list(running):
                if (found := one.poll(deadline)) is not None:
                    running.remove((case, one))
                    yield case, found if isinstance(found, str) else _joined(found)
    finally:
        for _, one in running:
            one.end()


def call(function: Callable[[Any], Any], argument: object, deadline: float) -> Any:
    """Call a function on one rank in a process of its own; returns what it returns, or a sentence why it failed."""
    running = _Running(1, function, argument)
    try:
        while (found := running.poll(deadline)) is None:
            wait(running.missing.values(), timeout=1.0)
        return found if isinstance(found, str) else found[0]
    finally:
        running.end()


class _Running:
    """Ranks that call a function."""

    def __init__(self, ranks: int, function: Callable[[Any], Any], argument: object) -> None:
        self.ranks, self.missing = ranks, dict[int, Connection]()
        self._folder = tempfile.TemporaryDirectory()
        self._found, self._limit = list[Any](), time.monotonic() + RANK_SECONDS
        self._processes = list[Any]()
        for rank in range(ranks):
            receive, send = FORK.Pipe(duplex=False)
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "TITAN_EXP_RENDEZVOUS": str(Path(self._folder.name) / "meet"),
            }
            process = FORK.Process(target=_rank, args=(send, environment, function, argument), daemon=True)
            process.start()
            send.close()
            self.missing[rank] = receive
            self._processes.append(process)

    def poll(self, deadline: float) -> list[Any] | str | None:
        """What all ranks returned, or why one failed; None while they run."""
        for rank, pipe in list(self.missing.items()):
            if not pipe.poll():
                continue
            try:
                failed, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                failed, value = True, "a rank died"
            if failed:
                self.end()
                return str(value)
            self._found.append(value)
            del self.missing[rank]
        if not self.missing:
            self.end()
            return self._found
        if time.monotonic() > min(deadline, self._limit):
            self.end()
            return "its ranks did not finish in time"
        return None

    def end(self) -> None:
        """Kill what still runs."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def _joined(ranks: Sequence[Any]) -> Recorded:
    """Put whole tensors together from the windows that ranks hold."""
    found = Recorded(losses=[sum(losses) for losses in zip(*(rank["losses"] for rank in ranks), strict=True)])
    for kind in ("gradients", "weights"):
        whole: dict[str, np.ndarray] = getattr(found, kind)
        for rank in ranks:
            for name, (shape, start, part) in rank[kind].items():
                target = whole.setdefault(name, np.full(shape, np.nan))
                if target.shape != shape:
                    continue
                window = tuple(slice(first, first + size) for first, size in zip(start, part.shape, strict=True))
                held = target[window]
                least = 1e-9 * np.abs(part).max(initial=0)
                if kind == "weights" and not np.all(np.isnan(held) | np.isclose(held, part, rtol=0, atol=least)):
                    found.disputed.append(name)
                target[window] = part
    for rank in ranks:
        for name, (width, kind, numbers) in rank["outputs"].items():
            before = found.outputs.get(name)
            found.outputs[name] = (width, kind, numbers if before is None else np.concatenate((before[2], numbers)))
    return found


def _rank(send: Connection, environment: dict[str, str], function: Callable[[Any], Any], argument: object) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a child process"
    Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    os.environ.update(environment)
    try:
        outcome = (False, function(argument))
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = " ".join(str(error).split())[:300]
        outcome = (True, f"{type(error).__name__} in {Path(where.filename).name}, line {where.lineno}: {reason}")
    send.send_bytes(pickle.dumps(outcome))
    send.close()
    os._exit(0)
