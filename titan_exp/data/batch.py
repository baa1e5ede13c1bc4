"""A micro-batch of packed rows, as the model takes it: tokens, what to predict, and where documents begin."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from titan_exp.ops.loss.cross_entropy import IGNORE_INDEX


@dataclass(frozen=True)
class Batch:
    """Rows of packed documents. Every tensor is int64 of shape [rows, seq]."""

    tokens: Tensor
    """Input token ids."""
    labels: Tensor
    """The token that follows each input token; `IGNORE_INDEX` where nothing is predicted."""
    positions: Tensor | None
    """Position of each token within its document in this row; None where positions count through the row."""
    documents: Tensor | None
    """Number of each token's document within the row, from 0; None where documents may attend to each other."""

    def to(self, device: torch.device | str) -> "Batch":
        """This batch on `device`; the copy overlaps with compute where the batch is pinned."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """This batch in page-locked memory, from which a GPU copies asynchronously. Needs CUDA."""
        return self.map(lambda tensor: tensor.pin_memory())

    def map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """This batch with each tensor that there is changed alike."""
        optional = (None if tensor is None else change(tensor) for tensor in (self.positions, self.documents))
        return Batch(change(self.tokens), change(self.labels), *optional)


def collate(
    windows: np.ndarray, starts: Sequence[Sequence[int]], *, document_mask: bool, reset_positions: bool
) -> Batch:
    """Make a batch of `windows` [rows, seq + 1], in which documents begin at `starts[row]` (each in 1..seq).

    With `document_mask`, the last token of a document does not predict the first token of the next one.
    """
    rows, length = windows.shape
    tokens, labels = windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64)
    if not (document_mask or reset_positions):
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), None, None)
    begins = np.zeros((rows, length), dtype=np.int64)
    for row, places in enumerate(starts):
        begins[row, list(places)] = 1
    documents = positions = None
    if document_mask:
        labels[begins[:, 1:] == 1] = IGNORE_INDEX
        documents = torch.from_numpy(begins[:, :-1].cumsum(axis=1))
    if reset_positions:
        index = np.arange(length - 1)
        latest = np.maximum.accumulate(np.where(begins[:, :-1] == 1, index, 0), axis=1)
        positions = torch.from_numpy(index - latest)
    return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), positions, documents)
