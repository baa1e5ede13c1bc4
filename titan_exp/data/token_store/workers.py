"""Tokenizer process pool: workers receive corpus parts over pipes and exit with their parent."""

import multiprocessing
import os
import signal
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.data.data_warning import DataWarning
from titan_exp.data.token_store.corpus import CorpusPart
from titan_exp.data.token_store.writer import PartTokenizer, ReportProgress, TokenizeJob


def tokenize_parts(job: TokenizeJob, parts: Sequence[CorpusPart], workers: int, report: ReportProgress) -> None:
    """Tokenize parts in `workers` processes, or in this process with `workers=1`.

    Raises UserError if a process was killed, or re-raises a process's exception. The other processes are killed;
    finished shards are kept.
    """
    workers = min(workers, len(parts))
    if workers == 1:
        tokenizer = PartTokenizer(job, report)
        for part in parts:
            tokenizer.run(part)
    if workers <= 1:
        return
    # Hugging Face tokenizers would start one thread per core in every process.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    context = multiprocessing.get_context("spawn")
    pool: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(workers):
            parent_end, child_end = context.Pipe()
            process = context.Process(target=_serve, args=(child_end, job), daemon=True)
            process.start()
            child_end.close()
            pool[parent_end] = process
        _distribute(pool, list(reversed(parts)), report)
    finally:
        for connection, process in pool.items():
            process.kill()
            process.join()
            connection.close()


def _distribute(pool: dict[Connection, BaseProcess], pending: list[CorpusPart], report: ReportProgress) -> None:
    """Send parts to idle processes until all parts are done."""
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
            if kind == "progress":
                report(*value)
            elif pending:
                connection.send(pending.pop())
            else:
                busy.remove(connection)


def _killed(process: BaseProcess) -> UserError:
    process.join()
    code = process.exitcode or 0
    cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return UserError(
        f"A tokenizer process died ({cause}). If memory ran out, use fewer processes: workers=1.\n"
        "  Finished shards are kept; type the same command to continue."
    )


def _serve(connection: Connection, job: TokenizeJob) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its workers
    warnings.simplefilter("ignore", DataWarning)  # it has warned already

    def send(kind: str, value: Any = None) -> None:
        connection.send((kind, value))

    try:
        tokenizer = PartTokenizer(job, lambda *counts: send("progress", counts))
        while True:
            send("idle")
            tokenizer.run(connection.recv())
    except (EOFError, BrokenPipeError):
        return  # the parent exited
    except BaseException as error:
        send("error", error)
