"""Processes that tokenize parts. Each has a pipe to the parent, and ends when the parent does, however that ends."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.data.token_store.corpus import CorpusPart
from titan_exp.data.token_store.writer import PartTokenizer, TokenizeJob

Progress = Callable[[int, int, int], None]
"""Called with how many documents, tokens and parts have been done since."""


def tokenize_parts(job: TokenizeJob, parts: Sequence[CorpusPart], workers: int, progress: Progress) -> None:
    """Tokenize parts in so many processes; one is this process itself.

    Raises:
        UserError: a process was killed.
        Exception: whatever a process raised; the others are stopped then, and what they finished stays.
    """
    workers = min(workers, len(parts))
    if workers <= 1:
        tokenization = PartTokenizer(job) if parts else None
        for part in parts:
            assert tokenization is not None
            tokenization.run(part, lambda documents, tokens: progress(documents, tokens, 0))
            progress(0, 0, 1)
        return
    # A tokenizer that has threads of its own would have as many as there are cores in every process.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    context = multiprocessing.get_context("spawn")
    pool: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, job), daemon=True)
            process.start()
            theirs.close()
            pool[ours] = process
        _share_out(pool, list(reversed(parts)), progress)
    finally:
        for connection, process in pool.items():
            process.kill()
            process.join()
            connection.close()


def _share_out(pool: dict[Connection, BaseProcess], left: list[CorpusPart], progress: Progress) -> None:
    """Give each process a part as soon as it has none, until all are done."""
    busy = set(pool)
    while busy:
        for connection in wait(list(busy)):
            assert isinstance(connection, Connection)
            try:
                kind, value = connection.recv()
            except EOFError:
                raise _killed(pool[connection]) from None
            if kind == "error":
                raise value
            if kind == "told":
                documents, tokens = value
                progress(documents, tokens, 0)
                continue
            if kind == "done":
                progress(0, 0, 1)
            if left:
                connection.send(left.pop())
            else:
                busy.remove(connection)


def _killed(process: BaseProcess) -> UserError:
    process.join()
    code = process.exitcode or 0
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return UserError(
        f"A process of the tokenizer died ({how}); where memory ran out, take fewer: workers=1.\n"
        "  What was finished stays: the same command continues."
    )


def _serve(connection: Connection, job: TokenizeJob) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop

    def say(kind: str, value: Any = None) -> None:
        connection.send((kind, value))

    try:
        tokenization = PartTokenizer(job)
        say("ready")
        while True:
            tokenization.run(connection.recv(), lambda documents, tokens: say("told", (documents, tokens)))
            say("done")
    except (EOFError, BrokenPipeError):
        return  # the parent is gone
    except BaseException as error:
        say("error", error)
