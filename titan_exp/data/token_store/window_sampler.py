"""Rows of token stores: windows of seq_len + 1 tokens in an order that is a function of seed and row number alone.

A store's training tokens are cut into windows that overlap by one, so that each token is predicted once in an epoch;
an epoch visits them in the order of a keyed permutation. What does not fill a window, less than seq_len tokens, is left
out, in every epoch elsewhere. The state of a run is its number of rows: any dp degree continues it, reading nothing.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.paths.token_store_manifest import Manifest, read_manifest, store_names
from titan_exp.data.permutation import Permutation
from titan_exp.data.sampler import SamplerState
from titan_exp.data.token_store.mixture import Mixture
from titan_exp.data.token_store.reader import TokenSplit
from titan_exp.data.validation_split import unit_hash

_STATE = "store"


class WindowSampler:
    """A `Sampler` over the stores of `data.paths`. Raises UserError where one cannot be used."""

    def __init__(self, experiment: Experiment, *, dp_rank: int, dp_degree: int) -> None:
        self._dp_rank, self._dp_degree = dp_rank, dp_degree
        data, seq_len, seed = experiment.data, experiment.training.seq_len, experiment.experiment.seed
        manifests = [read_manifest(path) for path in data.paths]
        self._names = store_names(data.paths)
        self._windows = [ShuffledWindows(manifest, seq_len, seed, number) for number, manifest in enumerate(manifests)]
        self._mixture = Mixture(data.weights or [len(windows) for windows in self._windows])
        self.corpus: dict[str, Any] = {
            "data.paths": [manifest.fingerprint for manifest in manifests],
            "data.weights": list(data.weights),
            "experiment.seed": seed,
            "training.seq_len": seq_len,
        }
        self.initial_state: SamplerState = {_STATE: {"rows": 0}}

    def restrict(self, states: Mapping[str, dict[str, Any]]) -> SamplerState:
        """The one state, which every rank shares."""
        if _STATE not in states:
            raise UserError("The checkpoint's data state holds no position in a token store.")
        rows = states[_STATE]["rows"]
        if rows % self._dp_degree:
            ranks = self._dp_degree
            raise UserError(f"The checkpoint stopped after {rows} rows, which {ranks} data ranks cannot share evenly.")
        return {_STATE: {"rows": rows}}

    def open(self, states: SamplerState) -> "WindowReader":
        """A reader from a number of rows on."""
        return WindowReader(self._windows, self._mixture, states[_STATE]["rows"], self._dp_rank, self._dp_degree)

    def state_at(self, rows: int) -> SamplerState:
        """Every position is known."""
        return {_STATE: {"rows": rows}}

    def source_name(self, row: int) -> str:
        """Name of the store, where there are several."""
        return self._names[self._mixture[row][0]] if len(self._names) > 1 else ""

    def epochs(self, states: SamplerState) -> dict[str, float]:
        """Rows given of each store, as passes over its windows; over all of them for the empty name."""
        rows = states[_STATE]["rows"]
        passes = {"": rows / sum(map(len, self._windows))}
        if len(self._names) > 1:
            counts = zip(self._names, self._mixture.counts(rows), self._windows, strict=True)
            passes |= {name: count / len(windows) for name, count, windows in counts}
        return passes

    def close(self) -> None:
        """Nothing runs."""


class WindowReader:
    """A `RowReader`: the rows of one rank."""

    def __init__(
        self, windows: list["ShuffledWindows"], mixture: Mixture, rows: int, dp_rank: int, dp_degree: int
    ) -> None:
        self._windows, self._mixture = windows, mixture
        self._rows, self._dp_rank, self._dp_degree = rows, dp_rank, dp_degree

    def prepare(self) -> None:
        """Nothing: a window is read when its turn comes."""

    def next_row(self, window: np.ndarray) -> tuple[list[int], SamplerState]:
        """Fill `window`; the state counts the rows of all ranks, which keep step."""
        source, number = self._mixture[self._rows + self._dp_rank]
        starts = self._windows[source].read(number, window)
        self._rows += self._dp_degree
        return starts, {_STATE: {"rows": self._rows}}


class ShuffledWindows:
    """The windows of one store, epoch after epoch, each in an order of its own. Raises UserError where there is none.

    Args:
        manifest: of the store.
        seq_len: tokens that a window predicts.
        seed: of the order.
        number: tells stores of one mixture apart, so that equal sizes do not mean equal orders.
    """

    def __init__(self, manifest: Manifest, seq_len: int, seed: int, number: int) -> None:
        self._tokens = TokenSplit(manifest, "train")
        self._seq_len = seq_len
        self._count, self._rest = divmod(len(self._tokens) - 1, seq_len)
        if self._count < 1:
            reason = f"{manifest.path} has {len(self._tokens)} tokens to train on, and a row takes {seq_len + 1}"
            violation = Violation("training.seq_len", seq_len, reason, "a shorter one, or a larger store")
            raise UserError("The token store is too small.", [violation])
        key = (seed, number)
        self._order = lru_cache(maxsize=4)(lambda epoch: Permutation(self._count, "windows", *key, epoch))
        self._shift = lru_cache(maxsize=4)(
            lambda epoch: int(unit_hash(f"shift/{seed}/{number}/{epoch}") * (self._rest + 1))
        )

    def __len__(self) -> int:
        """Windows in an epoch."""
        return self._count

    def read(self, number: int, window: np.ndarray) -> list[int]:
        """Fill `window` [seq_len + 1] with the window that comes after `number` others; returns where documents begin
        in it (each in 1..seq_len)."""
        epoch, at = divmod(number, self._count)
        return self._tokens.read(self._shift(epoch) + self._order(epoch)[at] * self._seq_len, window)
