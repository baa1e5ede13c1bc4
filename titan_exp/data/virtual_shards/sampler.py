"""Rows of documents that are tokenized while training: a fixed number of virtual shards, each a packed stream.

Row j of the run comes from virtual shard j mod V. dp divides V, so rank r owns the shards ≡ r (mod dp) and nobody else
needs their state: a checkpoint of all shards continues at any dp.
"""

import math
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.data.sampler import SamplerState
from titan_exp.data.sources.base import RandomAccessSource, Source, build_source, fingerprint, has_validation_split
from titan_exp.data.tokenizers.base import Tokenizer, build_tokenizer
from titan_exp.data.validation_split import training_subset
from titan_exp.data.virtual_shards.block_shuffle import BlockShuffledStream, StreamSpec
from titan_exp.data.virtual_shards.epoch_shuffle import EpochShuffle
from titan_exp.data.virtual_shards.indexed_stream import DocumentStream, IndexedStream, TokenizedDocuments
from titan_exp.data.virtual_shards.packing import PackedStream
from titan_exp.data.virtual_shards.thread_pool import DaemonThreadPool

_READ_AHEAD_THREADS = 8


class VirtualShardSampler:
    """A `Sampler` over the shards of one rank. Raises UserError where the corpus or the tokenizer cannot be used."""

    def __init__(self, experiment: Experiment, *, dp_rank: int, dp_degree: int) -> None:
        self._shards = experiment.data.virtual_shards
        assert self._shards % dp_degree == 0, "a rule of the configuration"
        self._dp_degree = dp_degree
        self._seq_len = experiment.training.seq_len
        tokenizer = build_tokenizer(experiment.data)
        source = build_source(experiment.data)
        self.corpus = _describe(experiment, source, tokenizer)
        own = range(dp_rank, self._shards, dp_degree)
        self._pool = (
            None if isinstance(source, RandomAccessSource) else DaemonThreadPool(min(_READ_AHEAD_THREADS, len(own)))
        )
        if self._pool is not None:
            weakref.finalize(self, self._pool.close)  # a task that runs would keep the pool alive after its last user
        self._streams = _build_streams(experiment, source, tokenizer, own, self._pool)
        self.initial_state: SamplerState = {str(shard): {"rows": 0} for shard in own}

    def restrict(self, states: Mapping[str, dict[str, Any]]) -> SamplerState:
        """The states of this rank's shards."""
        _check_complete(states, self._shards, self._dp_degree)
        return {shard: dict(states[shard]) for shard in self.initial_state}

    def open(self, states: SamplerState) -> "RoundRobinReader":
        """A reader; only one may be in use, for it moves this rank's streams."""
        packed = {shard: PackedStream(stream, self._seq_len) for shard, stream in self._streams.items()}
        for shard, state in states.items():
            packed[int(shard)].load_state_dict(state)
        return RoundRobinReader(packed, sum(state["rows"] for state in states.values()))

    def state_at(self, rows: int) -> SamplerState | None:
        """Only the beginning is known."""
        return None if rows else self.initial_state

    def source_name(self, row: int) -> str:
        """There is one source."""
        return ""

    def epochs(self, states: SamplerState) -> dict[str, float]:
        """Passes over the training documents, estimated from this rank's shards."""
        return {"": sum(self._streams[int(shard)].passes(state) for shard, state in states.items()) / len(states)}

    def close(self) -> None:
        """End the threads that read ahead."""
        if self._pool is not None:
            self._pool.close()


class RoundRobinReader:
    """A `RowReader` that takes a row from each shard in turn."""

    def __init__(self, shards: Mapping[int, PackedStream], rows: int) -> None:
        self._shards = shards
        self._order = sorted(shards)
        self._rows = rows

    def prepare(self) -> None:
        """Have all shards read ahead."""
        for shard in self._shards.values():
            shard.prepare()

    def next_row(self, window: np.ndarray) -> tuple[list[int], SamplerState]:
        """Fill `window` from the next shard."""
        number = self._order[self._rows % len(self._order)]
        self._rows += 1
        starts = self._shards[number].next_row(window)
        return starts, {str(number): self._shards[number].state_dict()}


def _build_streams(
    experiment: Experiment, source: Source, tokenizer: Tokenizer, own: range, pool: DaemonThreadPool | None
) -> dict[int, DocumentStream]:
    """The document stream of each of the virtual shards `own`."""
    seed, shards, held_out = experiment.experiment.seed, experiment.data.virtual_shards, _held_out(experiment)
    if isinstance(source, RandomAccessSource):
        documents = TokenizedDocuments(training_subset(source, held_out), tokenizer)
        order = EpochShuffle(len(documents), seed)
        return {shard: IndexedStream(documents, order, shard=shard, shards=shards) for shard in own}
    assert pool is not None
    if source.parts < shards:
        _warn_of_shared_parts(source.parts, shards)
    order = EpochShuffle(source.parts, seed)
    corpus = StreamSpec(source, tokenizer, order, seed, shards, experiment.data.shuffle_buffer, held_out)
    return {shard: BlockShuffledStream(corpus, pool, shard) for shard in own}


def _warn_of_shared_parts(parts: int, shards: int) -> None:
    times = math.ceil(shards / parts)
    warnings.warn(
        f"data.virtual_shards={shards}, but the stream has {parts} independent parts, each to be read {times} times; "
        f"data.virtual_shards={parts} or less reads it once (in another order), and so does data.streaming=false",
        stacklevel=2,
    )


def _held_out(experiment: Experiment) -> float:
    """Share of the training documents that is held out; none where evaluation has documents of its own."""
    return 0.0 if has_validation_split(experiment.data) else experiment.data.validation_fraction


def _describe(experiment: Experiment, source: Source, tokenizer: Tokenizer) -> dict[str, Any]:
    """What positions in the data refer to."""
    description = {
        "data.source": fingerprint(source, experiment.data),
        "data.tokenizer": tokenizer.fingerprint,
        "data.validation_fraction": _held_out(experiment),
        "data.virtual_shards": experiment.data.virtual_shards,
        "experiment.seed": experiment.experiment.seed,
    }
    if not isinstance(source, RandomAccessSource):
        description["data.shuffle_buffer"] = experiment.data.shuffle_buffer
    return description


def _check_complete(states: Mapping[str, dict[str, Any]], shards: int, dp_degree: int) -> None:
    """Every shard must be there, and all must have stopped at the same row of the run."""
    if set(states) != set(map(str, range(shards))):
        raise UserError(f"The checkpoint's data state holds {len(states)} of {shards} virtual shards.")
    row = sum(state["rows"] for state in states.values())
    torn = [shard for shard, state in states.items() if state["rows"] != len(range(int(shard), row, shards))]
    if torn:
        raise UserError(f"The checkpoint's data state is torn: its virtual shard {torn[0]} stopped at another row.")
    if row % dp_degree:
        raise UserError(f"The checkpoint stopped after {row} rows, which {dp_degree} data ranks cannot share evenly.")
