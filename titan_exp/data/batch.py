"""Micro-batches: the interface of every kind, and packed rows of input tokens, labels, positions and document ids."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from titan_exp.ops.cross_entropy import IGNORE_INDEX


@runtime_checkable
class SequencePart(Protocol):
    """Part of every sequence that a context-parallel rank computes."""

    def take(self, whole: Tensor, /) -> Tensor:
        """Take this rank's tokens of a tensor [rows, seq, ...]."""
        ...

    def positions(self, tokens: Tensor, /) -> Tensor:
        """Positions of this rank's tokens in the whole sequence, for `tokens` [rows, seq]."""
        ...


class Inputs(NamedTuple):
    """Arguments of a model's `forward`."""

    positional: tuple[Tensor | None, ...]
    """Positional arguments."""
    named: dict[str, Tensor | None]
    """Named arguments."""


class MicroBatch(ABC):
    """Rows of a micro-batch, as tensors whose first dim is the row."""

    @property
    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """All tensors of the batch."""

    @abstractmethod
    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply a function to every tensor of the batch."""

    @abstractmethod
    def inputs(self, hidden: Tensor | None = None) -> "Inputs":
        """Arguments of a model's `forward`; with `hidden` states, those of a later pipeline stage."""

    @abstractmethod
    def sharded(self, part: SequencePart) -> Self:
        """Take this rank's part of every sequence."""

    def to(self, device: torch.device | str) -> Self:
        """Copy the batch to `device`, asynchronously if it is pinned."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Self:
        """Copy the batch to page-locked memory. Needs CUDA."""
        return self.map(lambda tensor: tensor.pin_memory())


@dataclass(frozen=True)
class Batch(MicroBatch):
    """Rows of packed documents. Every tensor is int64 of shape [rows, seq]."""

    tokens: Tensor
    labels: Tensor
    """Next-token targets; `IGNORE_INDEX` excludes a position from the loss."""
    positions: Tensor | None
    """Position of each token within its document in this row; None if positions count through the row."""
    documents: Tensor | None
    """Index of each token's document within the row; None if attention crosses document boundaries."""
    further: tuple["Batch", ...] = ()
    """Batches of the tokens 1, 2, ... places ahead with their labels, for multi-token prediction; positions and
    documents are this batch's."""

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the batch."""
        own = (self.tokens, self.labels, self.positions, self.documents)
        return [tensor for tensor in own if tensor is not None] + [
            tensor for batch in self.further for tensor in batch.tensors
        ]

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Apply a function to every tensor of the batch."""
        positions, documents = (
            None if tensor is None else function(tensor) for tensor in (self.positions, self.documents)
        )
        further = tuple(batch.map(function) for batch in self.further)
        return Batch(function(self.tokens), function(self.labels), positions, documents, further)

    def inputs(self, hidden: Tensor | None = None) -> Inputs:
        """Arguments: tokens or hidden states, positions, documents."""
        return Inputs((self.tokens if hidden is None else hidden, self.positions, self.documents), {})

    def sharded(self, part: SequencePart) -> "Batch":
        """Take this rank's tokens. Positions become explicit, because a token's index in the part is not its
        position."""
        shard = self.map(part.take)
        return shard if shard.positions is not None else replace(shard, positions=part.positions(self.tokens))

    def with_further(self, depth: int) -> "Batch":
        """Return this batch of whole rows with the tokens up to `depth` places ahead.

        Token i + k predicts token i + k + 1. If documents are masked, both must be in the document of token i. The last
        k tokens of a row have no label, because their target lies beyond it; the row's last token stands in for the
        tokens after it, and no counted prediction depends on it.
        """
        return replace(self, further=tuple(self._ahead(places) for places in range(1, depth + 1)))

    def _ahead(self, places: int) -> "Batch":
        tokens = torch.cat((self.tokens[:, places:], self.tokens[:, -1:].expand(-1, places)), dim=1)
        labels = torch.full_like(self.labels, IGNORE_INDEX)
        labels[:, :-places] = self.labels[:, places:]
        if self.documents is not None:
            labels[:, :-places][self.documents[:, places:] != self.documents[:, :-places]] = IGNORE_INDEX
        return Batch(tokens, labels, None, None)


def collate(
    windows: np.ndarray, starts: Sequence[Sequence[int]], *, document_mask: bool, reset_positions: bool
) -> Batch:
    """Collate `windows` [rows, seq + 1], with document starts `starts[row]` (each in 1..seq), into a batch.

    With `document_mask`, the last token of a document does not predict the first token of the next one.
    """
    rows, length = windows.shape
    tokens, labels = windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64)
    if not (document_mask or reset_positions):
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), None, None)
    begins = np.zeros((rows, length), dtype=np.int64)
    for row, offsets in enumerate(starts):
        begins[row, list(offsets)] = 1
    documents = positions = None
    if document_mask:
        labels[begins[:, 1:] == 1] = IGNORE_INDEX
        documents = torch.from_numpy(begins[:, :-1].cumsum(axis=1))
    if reset_positions:
        index = np.arange(length - 1)
        latest = np.maximum.accumulate(np.where(begins[:, :-1] == 1, index, 0), axis=1)
        positions = torch.from_numpy(index - latest)
    return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), positions, documents)
