"""Small corpora with a distinct word per position, and loaders over them in any layout."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.data.batch import Batch
from titan_exp.data.train_loader import TrainLoader

Rows = list[tuple[int, ...]]


class OwnTable:
    """User-defined random-access source: `documents` texts without common words."""

    def __init__(self, config: DataConfig, *, documents: int = 40, empty: Sequence[int] = ()) -> None:
        self.reads: list[int] = []
        self._texts = ["" if number in empty else text(number) for number in range(documents)]

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> str:
        self.reads.append(index)
        return self._texts[index]


class OwnReader:
    """Reader whose state is an index."""

    def __init__(self, texts: Sequence[str], begin: int) -> None:
        self._texts, self._next = texts, begin

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._next == len(self._texts):
            raise StopIteration
        self._next += 1
        return self._texts[self._next - 1]

    def state_dict(self) -> Mapping[str, Any]:
        return {"next": self._next}


class OwnStream:
    """User-defined streaming source: the texts of `OwnTable` in parts of the given sizes."""

    def __init__(self, config: DataConfig, *, sizes: Sequence[int] = (13,) * 9) -> None:
        self._parts: list[list[str]] = []
        for size in sizes:
            begin = sum(map(len, self._parts))
            self._parts.append([text(begin + number) for number in range(size)])

    @property
    def parts(self) -> int:
        return len(self._parts)

    def open(self, part: int, state: Mapping[str, Any] | None) -> OwnReader:
        return OwnReader(self._parts[part], state["next"] if state else 0)


def own_stream(config: DataConfig) -> OwnStream:
    """Open a stream, as a function of the user's does."""
    return OwnStream(config)


class BrokenTable(OwnTable):
    """Source whose files were deleted."""

    def __getitem__(self, index: int) -> str:
        raise FileNotFoundError("gone")


OWN_TABLE, OWN_STREAM, BROKEN = (f"{__name__}.{kind.__name__}" for kind in (OwnTable, OwnStream, BrokenTable))


def text(number: int) -> str:
    """Text of document `number`, whose words are in no other document."""
    return "".join(f"{number:03d}/{word:03d} " for word in range(3 + 2 * (number % 17)))


@cache
def _base() -> Experiment:
    return to_experiment(compose(["tracking=jsonl"]))


def experiment(*, seed: int = 0, seq_len: int = 24, batch: int = 8, **data: Any) -> Experiment:
    """The default experiment with 8 virtual shards, over `OwnTable` unless `data` says otherwise."""
    base = _base()
    defaults = {"source": OWN_TABLE, "virtual_shards": 8, "validation_fraction": 0.1, "shuffle_buffer": 4}
    return replace(
        base,
        experiment=replace(base.experiment, seed=seed),
        training=replace(base.training, seq_len=seq_len, global_batch_size=batch),
        data=replace(base.data, **{**defaults, **data}),
    )


class Ranks:
    """Every data rank of a run, in this process."""

    def __init__(self, run: Experiment, dp_degree: int, micro_batch_size: int, state: Mapping[str, Any] | None = None):
        self._micro_batches = run.training.global_batch_size // (dp_degree * micro_batch_size)
        self.loaders = [
            TrainLoader(
                run.data,
                run.training,
                run.experiment.seed,
                dp_rank=rank,
                dp_degree=dp_degree,
                micro_batch_size=micro_batch_size,
                pin_memory=False,
            )
            for rank in range(dp_degree)
        ]
        if state is not None:
            for loader in self.loaders:
                loader.load_state_dict(state)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for loader in self.loaders:
            loader.close()

    def global_batches(self, count: int) -> list[Rows]:
        """Sorted rows of each of the next global batches."""
        return [sorted(row for loader in self.loaders for row in self._share(loader)) for _ in range(count)]

    def rows(self, global_batches: int) -> Rows:
        """Rows of the next global batches, in the order of the run."""
        shares = [[row for _ in range(global_batches) for row in self._share(loader)] for loader in self.loaders]
        return [row for turn in zip(*shares, strict=True) for row in turn]

    def state(self) -> dict[str, Any]:
        """Data state of all ranks, as in a checkpoint. Ranks that hold the same position agree about it."""
        state: dict[str, Any] = {}
        for loader in self.loaders:
            own = json.loads(json.dumps(loader.state_dict()))
            assert {key: state[key] for key in own if key in state} == {key: own[key] for key in own if key in state}
            state |= own
        return state

    def _share(self, loader: TrainLoader) -> Rows:
        return [row for _ in range(self._micro_batches) for row in rows_of(next(loader))]


def rows_of(batch: Batch) -> Rows:
    """Windows of a batch: tokens and the last label."""
    windows = zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True)
    return [(*tokens, labels[-1]) for tokens, labels in windows]


def write_files(folder: Path, count: int) -> Path:
    """Write `count` text files into a new folder."""
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:03d}.txt").write_text(text(number))
    return folder
