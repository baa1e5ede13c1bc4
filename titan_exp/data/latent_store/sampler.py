"""Latent sampler: shuffled samples of a latent store or of images, a pure function of seed and row number.

The sampler's state is a number of rows: any dp degree resumes from it without reading.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.data import DataConfig
from titan_exp.data.latent_batch import LatentBatch
from titan_exp.data.latent_store.latent_data import open_latents
from titan_exp.data.latent_store.samples import LatentSamples
from titan_exp.data.permutation import Permutation
from titan_exp.data.sampler import NextRow, SamplerState

_STATE = "latents"


class LatentSampler:
    """`Sampler` over the training samples of the data group, which are permuted anew in every epoch.

    Raises:
        UserError: the store or the images cannot be used, or there is nothing to train on.
    """

    def __init__(self, data: DataConfig, seq_len: int, seed: int, *, dp_rank: int, dp_degree: int) -> None:
        self._dp_rank, self._dp_degree = dp_rank, dp_degree
        found = open_latents(data)
        self._split = found.splits["train"]
        if not len(self._split):
            raise UserError("There is nothing to train on: every image is held out. A smaller validation_fraction.")
        self._order = lru_cache(maxsize=4)(lambda epoch: Permutation(len(self._split), "latents", seed, epoch))
        self.corpus: dict[str, Any] = {**found.identity, "experiment.seed": seed}
        self.initial_state: SamplerState = {_STATE: {"rows": 0}}

    def rows(self, count: int) -> "LatentRows":
        """Rows to fill."""
        return LatentRows(self._split, count)

    def restrict(self, states: Mapping[str, dict[str, Any]]) -> SamplerState:
        """Return the single position, shared by all ranks."""
        if _STATE not in states:
            raise UserError("The checkpoint's data state has no position in a latent store.")
        return {_STATE: {"rows": states[_STATE]["rows"]}}

    def open(self, state: SamplerState) -> NextRow:
        """Open a reader of this rank's rows; the position counts the rows of all ranks, which advance together."""
        rows = state[_STATE]["rows"]

        def next_row(fill: Callable[[int, int], None]) -> tuple[list[int], SamplerState]:
            nonlocal rows
            sample = rows + self._dp_rank
            epoch, rank = divmod(sample, len(self._split))
            rows += self._dp_degree
            fill(self._order(epoch)[rank], sample)
            return [], {_STATE: {"rows": rows}}

        return next_row

    def state_at(self, rows: int) -> SamplerState:
        """Position after `rows` rows."""
        return {_STATE: {"rows": rows}}

    def source_name(self, row: int) -> str:
        """Empty: there is a single source."""
        return ""

    def epochs(self, state: SamplerState) -> dict[str, float]:
        """Epochs over the samples."""
        return {"": state[_STATE]["rows"] / len(self._split)}

    def close(self) -> None:
        """Do nothing: samples are read on demand."""


class LatentRows:
    """Rows of a micro-batch: iterating yields functions that fill them, from an index in the split and a number."""

    def __init__(self, split: LatentSamples, count: int) -> None:
        self._split, self._count = split, count
        self._indices, self._samples = list[int](), list[int]()

    def __iter__(self) -> Iterator[Callable[[int, int], None]]:
        for _ in range(self._count):
            yield self._fill

    def collate(self, starts: Sequence[Sequence[int]]) -> LatentBatch:
        """Batch of the filled rows."""
        return self._split.batch(self._indices, self._samples, [1.0] * self._count)

    def _fill(self, index: int, sample: int) -> None:
        self._indices.append(index)
        self._samples.append(sample)
