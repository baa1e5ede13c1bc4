"""What is tokenized, in parts that can be read independently and from the middle: each gives documents in order."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.data import DataConfig
from titan_exp.data.permutation import Permutation
from titan_exp.data.sources.base import (
    RandomAccessSource,
    Source,
    build_source,
    build_validation_source,
    fingerprint,
    has_validation_split,
)
from titan_exp.data.validation_split import unit_hash, unit_hashes

_CHUNK = 4096


@dataclass(frozen=True, order=True)
class CorpusPart:
    """A part of the text. All parts in their order are all of it."""

    split: str
    """`train` for the documents to train on, those held out of them included; `validation` for a split of its own."""
    number: int
    """From 0, in the order of the source."""

    def __str__(self) -> str:
        return f"{self.split}-{self.number:05d}"


@dataclass(frozen=True)
class Document:
    """A document of a part."""

    text: str
    """May be empty."""
    split: str
    """Where it belongs: `train` or `validation`."""
    after: Callable[[], Any]
    """Position in the part after this document, in JSON's types; for the newest document only."""


class Corpus:
    """The text of a `data` group, divided into parts.

    Held out are the documents that `TrainLoader` and `ValidationLoader` hold out when they read the text themselves.
    With `shuffle`, a seed, the documents to train on (and those held out of them) are divided into parts and read in an
    order of their own, which is a function of the seed and their number: nothing is sorted, stored, or read twice.

    Raises UserError where it cannot be read, or shuffled.
    """

    def __init__(self, config: DataConfig, most_parts: int, shuffle: int = 0) -> None:
        own = build_validation_source(config)
        self._sources: dict[str, Source] = {"train": build_source(config)}
        if own is not None:
            self._sources["validation"] = own
        self._order: Permutation | None = None
        if shuffle:
            documents = self._sources["train"]
            if not isinstance(documents, RandomAccessSource):
                reason = "the source is a stream, which is read in its own order"
                remedy = "shuffle=0 (training shuffles windows all the same), or data.streaming=false"
                raise UserError("The documents cannot be shuffled.", [Violation("shuffle", shuffle, reason, remedy)])
            self._order = Permutation(max(1, len(documents)), "documents", shuffle)
        self._fraction = 0.0 if has_validation_split(config) else config.validation_fraction
        self._counts = {split: _count(source, most_parts) for split, source in self._sources.items()}
        self.fingerprint = "; ".join(fingerprint(source, config) for source in self._sources.values())
        """Changes with the text."""
        self.held_out = f"split {config.validation_split}" if own is not None else self._fraction
        """What is evaluated on: a share of the documents, or a split of its own."""

    @property
    def parts(self) -> list[CorpusPart]:
        """All parts, in order."""
        return [CorpusPart(split, number) for split, count in self._counts.items() for number in range(count)]

    @property
    def documents(self) -> int | None:
        """How many documents there are; None where only reading tells."""
        lengths = [len(source) for source in self._sources.values() if isinstance(source, RandomAccessSource)]
        return sum(lengths) if len(lengths) == len(self._sources) else None

    def read(self, part: CorpusPart, position: Any) -> Iterator[Document]:
        """The documents of a part, from a position of it (None: its beginning) on."""
        source = self._sources[part.split]
        fraction = self._fraction if part.split == "train" else 1.0
        if not isinstance(source, RandomAccessSource):
            reader = source.open(part.number, position)
            for text in reader:
                split = "validation" if fraction and unit_hash(text) < fraction else "train"
                yield Document(text, split, reader.state_dict)
            return
        count = self._counts[part.split]
        begin, end = (len(source) * number // count for number in (part.number, part.number + 1))
        first = begin if position is None else position
        order = self._order if part.split == "train" else None
        for chunk in range(first, end, _CHUNK):
            which = range(chunk, min(chunk + _CHUNK, end))
            # A shuffled chunk is places all over the source.
            numbers = which if order is None else [order[index] for index in which]
            held_out = np.ones(len(which), dtype=bool)
            if fraction < 1 and isinstance(numbers, range):
                held_out = unit_hashes(source, numbers) < fraction
            elif fraction < 1:
                held_out = np.array([unit_hashes(source, range(one, one + 1))[0] < fraction for one in numbers])
            for index, number, held in zip(which, numbers, held_out, strict=True):
                yield Document(source[number], "validation" if held else "train", lambda after=index + 1: after)


def _count(source: Source, most: int) -> int:
    return min(len(source), most) if isinstance(source, RandomAccessSource) else source.parts
