"""Sources that kill a process at a given document. Imported by workers, so without torch."""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_exp.config.groups.run import DataConfig


def text(number: int) -> str:
    """Document `number`; every seventh is empty."""
    return "" if number % 7 == 3 else "".join(f"{number:03d}/{word:03d} " for word in range(2 + number * 5 % 13))


class Texts:
    """Random access; notes each reading in the file `reads`, and once, when document `at` is read, kills `victim`: this
    process (`worker` or empty), the `parent`, or the `interrupted parent` with Ctrl-C."""

    fingerprint = "texts of the tests"

    def __init__(
        self,
        config: DataConfig,
        *,
        documents: int = 60,
        reads: str = "",
        at: int = -1,
        once: str = "",
        victim: str = "",
    ) -> None:
        self._documents, self._reads, self._at, self._once, self._victim = documents, reads, at, once, victim

    def __len__(self) -> int:
        return self._documents

    def __getitem__(self, index: int) -> str:
        if self._reads:
            with open(self._reads, "a") as file:
                file.write(f"{index}\n")
        if index == self._at and not Path(self._once).exists():
            Path(self._once).write_text(str(os.getpid()))
            victim = os.getpid() if self._victim in ("", "worker") else os.getppid()
            os.kill(victim, signal.SIGINT if self._victim == "interrupted parent" else signal.SIGKILL)
        return text(index)


class PartReader:
    """Reader whose state is an index."""

    def __init__(self, source: Texts, documents: Sequence[int], begin: int) -> None:
        self._source, self._documents, self._next = source, documents, begin

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._next == len(self._documents):
            raise StopIteration
        self._next += 1
        return self._source[self._documents[self._next - 1]]

    def state_dict(self) -> Mapping[str, Any]:
        return {"next": self._next}


class Stream:
    """The same texts, streamed in three parts."""

    fingerprint = "streamed texts of the tests"
    parts = 3

    def __init__(self, config: DataConfig, **options: Any) -> None:
        self._texts = Texts(config, **options)

    def open(self, part: int, state: Mapping[str, Any] | None) -> PartReader:
        count = len(self._texts)
        documents = range(count * part // self.parts, count * (part + 1) // self.parts)
        return PartReader(self._texts, documents, state["next"] if state else 0)


TEXTS, STREAM = f"{__name__}.Texts", f"{__name__}.Stream"
