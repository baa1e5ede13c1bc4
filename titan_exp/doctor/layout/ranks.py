"""Ranks of a layout check: the trainer's own build and step in fp64, on processes forked from one with torch."""

import math
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from torch.distributed.tensor import debug

from titan_exp.config.devices import usable_cores
from titan_exp.doctor.layout.cases import MOST_RANKS, Case
from titan_exp.doctor.layout.steps import train_steps

RANK_SECONDS = 30.0  # seconds that a case may take from the start of its ranks on
FORK = multiprocessing.get_context("fork")


@dataclass
class Recorded:
    """Numbers of a case, put together from all of its ranks."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    """Whole gradient of each parameter in the first step, in the order of the model."""
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    """Whole parameters and persistent buffers after the last step."""
    outputs: dict[str, tuple[int, str, np.ndarray]] = field(default_factory=dict)
    """Each module's first output in the first step, as in `steps.Output`, in forward order."""
    disputed: list[str] = field(default_factory=list)
    """Names of parameters and buffers of which ranks hold different values after the last step."""
    dropped: float = 0.0  # largest rate of dropout that was left out


def sets(cases: Sequence[Case]) -> list[list[Case]]:
    """Cases that the same processes train one after another, since a process that has trained once is twice as fast. A
    rank has the same pipeline stage in all of them: what your code keeps from one stage must not help another."""
    found: dict[tuple[int, int], list[Case]] = {}
    for case in cases:
        found.setdefault((case.ranks, case.experiment.parallelism.pp), []).append(case)
    return list(found.values())


def record(cases: Iterable[Sequence[Case]], deadline: float) -> Iterator[tuple[Case, Recorded | str]]:
    """Numbers of the cases of some sets, or a sentence why there are none, in the order in which they end; as many
    processes run at a time as there are cores, until the deadline on the monotonic clock."""
    waiting, running = deque(map(deque, cases)), list[tuple[deque[Case], _Running]]()
    try:
        while waiting or running:
            busy = sum(one.ranks for _, one in running)
            while waiting and busy + waiting[0][0].ranks <= max(MOST_RANKS, usable_cores()):
                chosen = waiting.popleft()
                runs = [case.experiment for case in chosen]
                running.append((chosen, _Running(chosen[0].ranks, train_steps, runs)))
                busy += chosen[0].ranks
            wait([pipe for _, one in running for pipe in one.missing.values()], timeout=1.0)
            for entry in list(running):
                chosen, one = entry
                while chosen and (found := one.poll(deadline)) is not None:
                    yield chosen.popleft(), found if isinstance(found, str) else _joined(found)
                    if isinstance(found, str):
                        break
                else:
                    if chosen:
                        continue
                one.end()
                running.remove(entry)
                if chosen:
                    waiting.append(chosen)
    finally:
        for _, one in running:
            one.end()


def call(function: Callable[[Any], Any], argument: object, deadline: float) -> Any:
    """Call a function on one rank in a process of its own; returns what it returns, or a sentence why it failed."""
    running = _Running(1, function, [argument])
    try:
        while (found := running.poll(deadline)) is None:
            wait(running.missing.values(), timeout=1.0)
        return found if isinstance(found, str) else found[0]
    finally:
        running.end()


class _Running:
    """Ranks that call a function with each of some arguments."""

    def __init__(self, ranks: int, function: Callable[[Any], Any], arguments: Sequence[object]) -> None:
        self.ranks, self._pipes, self._processes = ranks, dict[int, Connection](), list[Any]()
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(ranks):
            receive, send = FORK.Pipe(duplex=False)
            environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            given = (send, environment, Path(self._folder.name), function, arguments)
            process = FORK.Process(target=_rank, args=given, daemon=True)
            process.start()
            send.close()
            self._pipes[rank] = receive
            self._processes.append(process)
        self._begin()

    def _begin(self) -> None:
        """Wait for the results of the next argument."""
        self.missing = dict(self._pipes)
        self._found, self._limit = list[Any](), time.monotonic() + RANK_SECONDS

    def poll(self, deadline: float) -> list[Any] | str | None:
        """What all ranks returned for an argument, or why one failed; None while they run."""
        for rank, pipe in list(self.missing.items()):
            if not pipe.poll():
                continue
            try:
                failed, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                failed, value = True, "a rank died"
            if failed:
                return str(value)
            self._found.append(value)
            del self.missing[rank]
        if not self.missing:
            found = self._found
            self._begin()
            return found
        if time.monotonic() > min(deadline, self._limit):
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
    losses = [math.fsum(losses) for losses in zip(*(rank["losses"] for rank in ranks), strict=True)]
    found = Recorded(losses, dropped=max(rank["dropped"] for rank in ranks))
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


def _rank(
    send: Connection,
    environment: dict[str, str],
    folder: Path,
    function: Callable[[Any], Any],
    arguments: Sequence[object],
) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a child process"
    Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    for number, argument in enumerate(arguments):
        os.environ.update(environment, TITAN_EXP_RENDEZVOUS=str(folder / f"meet{number}"))
        debug._clear_sharding_prop_cache()  # it would return shardings on the last layout's groups
        try:
            outcome = (False, function(argument))
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            reason = " ".join(str(error).split())[:300]
            outcome = (True, f"{type(error).__name__} in {Path(where.filename).name}, line {where.lineno}: {reason}")
        send.send_bytes(pickle.dumps(outcome))
        if outcome[0]:
            break
    send.close()
    os._exit(0)
