"""Corpus to tokenize, divided into independently readable and resumable parts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from titan_exp.config.data_files import unit_hash
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.run import DataConfig
from titan_exp.data.sampler import Permutation
from titan_exp.data.sources.base import (
    CONTENT,
    RandomAccessSource,
    Source,
    build_source,
    build_validation_source,
    content_identity,
    fingerprint,
)
from titan_exp.data.validation_split import unit_hashes

_CHUNK = 4096


@dataclass(frozen=True, order=True)
class CorpusPart:
    """Part of the corpus; parts are ordered."""

    split: str
    """`train` (held-out documents included), or `validation` for a separate split."""
    number: int
    """Index in source order."""

    def __str__(self) -> str:
        return f"{self.split}-{self.number:05d}"


@dataclass(frozen=True)
class Document:
    """Document of a corpus part."""

    text: str
    """Text; may be empty."""
    split: str
    next_position: Callable[[], Any]
    """Returns the JSON-serializable position after this document; valid only for the latest document."""


class Corpus:
    """Text of the `data` group, divided into at most `max_parts` parts (a stream keeps its own parts).

    The held-out documents are the same as in `TrainLoader` and `ValidationLoader`. A non-zero `shuffle` seed permutes
    the training documents (held-out ones included), as a function of seed and number of documents. Raises UserError if
    the text cannot be read or shuffled.
    """

    def __init__(self, data: DataConfig, max_parts: int, shuffle: int = 0) -> None:
        own = build_validation_source(data)
        self._sources: dict[str, Source] = {"train": build_source(data)}
        if own is not None:
            self._sources["validation"] = own
        self._order: Permutation | None = None
        if shuffle:
            documents = self._sources["train"]
            if not isinstance(documents, RandomAccessSource):
                reason = "this source is a stream, which has an order of its own"
                downloaded = ", or data.streaming=false" if data.streaming else ""
                remedy = f"use shuffle=0 (training still shuffles windows){downloaded}"
                raise UserError("Cannot shuffle the documents.", [Violation("shuffle", shuffle, reason, remedy)])
            self._order = Permutation(max(1, len(documents)), "documents", shuffle)
        self._fraction = 0.0 if own is not None else data.validation_fraction
        self._counts = {
            split: min(len(source), max_parts) if isinstance(source, RandomAccessSource) else source.parts
            for split, source in self._sources.items()
        }
        self.fingerprint = "; ".join(fingerprint(source, data) for source in self._sources.values())
        self.content = [content_identity(source).get(CONTENT) for source in self._sources.values()]
        """Content of local files, per split; None if there are none."""
        self.held_out = f"split {data.validation_split}" if own is not None else self._fraction
        """Choice of validation documents: a share of the documents, or a separate split."""

    @property
    def parts(self) -> list[CorpusPart]:
        """All parts, in order."""
        return [CorpusPart(split, number) for split, count in self._counts.items() for number in range(count)]

    @property
    def documents(self) -> int | None:
        """Number of documents; None for a stream."""
        lengths = [len(source) for source in self._sources.values() if isinstance(source, RandomAccessSource)]
        return sum(lengths) if len(lengths) == len(self._sources) else None

    def read(self, part: CorpusPart, position: Any) -> Iterator[Document]:
        """Read the documents of a part from a position on (None: the beginning)."""
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
        order = self._order if part.split == "train" else None
        for chunk in range(begin if position is None else position, end, _CHUNK):
            ranks = range(chunk, min(chunk + _CHUNK, end))
            indices = ranks if order is None else [order[rank] for rank in ranks]
            held_out = np.ones(len(ranks), dtype=bool)
            if fraction < 1 and isinstance(indices, range):
                held_out = unit_hashes(source, indices) < fraction
            elif fraction < 1:
                held_out = np.array([unit_hashes(source, range(index, index + 1))[0] < fraction for index in indices])
            for rank, index, held in zip(ranks, indices, held_out, strict=True):
                yield Document(source[index], "validation" if held else "train", lambda following=rank + 1: following)
