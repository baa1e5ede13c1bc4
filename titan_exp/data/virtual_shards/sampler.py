"""Virtual-shard sampler: rows of documents tokenized during training.

Row j of the run comes from virtual shard j mod V. The dp degree divides V, so rank r owns the shards ≡ r (mod dp) and
no other rank needs their state: a checkpoint of all shards resumes under any dp degree.
"""

import math
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.data import DataConfig
from titan_exp.data.sampler import NextRow, SamplerState
from titan_exp.data.sources.base import RandomAccessSource, Source, content_identity, fingerprint
from titan_exp.data.sources.build import build_source, has_validation_split
from titan_exp.data.tokenizers.base import Tokenizer
from titan_exp.data.tokenizers.build import build_tokenizer
from titan_exp.data.validation_split import training_subset
from titan_exp.data.virtual_shards.block_shuffle import BlockShuffledStream, StreamSpec
from titan_exp.data.virtual_shards.document_stream import DocumentStream
from titan_exp.data.virtual_shards.epoch_shuffle import EpochShuffle
from titan_exp.data.virtual_shards.indexed_stream import IndexedStream, TokenizedDocuments
from titan_exp.data.virtual_shards.packing import PackedStream
from titan_exp.data.virtual_shards.thread_pool import DaemonThreadPool

_READ_AHEAD_THREADS = 8


class VirtualShardSampler:
    """`Sampler` over one rank's virtual shards. Raises UserError if the corpus or the tokenizer cannot be used."""

    def __init__(self, data: DataConfig, seq_len: int, seed: int, *, dp_rank: int, dp_degree: int) -> None:
        self._shards = data.virtual_shards
        assert self._shards % dp_degree == 0, "checked by the rules"
        self._dp_degree = dp_degree
        self._seq_len = seq_len
        tokenizer, source = build_tokenizer(data), build_source(data)
        held_out = 0.0 if has_validation_split(data) else data.validation_fraction
        self.corpus = {
            "data.source": fingerprint(source, data),
            **content_identity(source),
            "data.tokenizer": tokenizer.fingerprint,
            "data.validation_fraction": held_out,
            "data.virtual_shards": self._shards,
            "experiment.seed": seed,
        }
        own = range(dp_rank, self._shards, dp_degree)
        self._pool: DaemonThreadPool | None = None
        if not isinstance(source, RandomAccessSource):
            self.corpus["data.shuffle_buffer"] = data.shuffle_buffer
            self._pool = DaemonThreadPool(min(_READ_AHEAD_THREADS, len(own)))
            weakref.finalize(self, self._pool.close)  # a running task would keep the pool alive
        self._streams = _build_streams(data, source, tokenizer, own, self._pool, seed=seed, held_out=held_out)
        self.initial_state: SamplerState = {str(shard): {"rows": 0} for shard in own}

    def restrict(self, states: Mapping[str, dict[str, Any]]) -> SamplerState:
        """Positions of this rank's shards."""
        _check_complete(states, self._shards, self._dp_degree)
        return {shard: dict(states[shard]) for shard in self.initial_state}

    def open(self, state: SamplerState) -> NextRow:
        """Open a reader of one row per shard in turn. Only one may be in use: it moves this rank's streams."""
        packed = {shard: PackedStream(stream, self._seq_len) for shard, stream in sorted(self._streams.items())}
        for shard, position in state.items():
            packed[int(shard)].load_state_dict(position)
        for stream in self._streams.values():
            stream.prefetch()
        shards = list(packed)
        rows = sum(position["rows"] for position in state.values())

        # No reference to the sampler: its collection closes the pool that a reading thread may wait for.
        def next_row(window: np.ndarray) -> tuple[list[int], SamplerState]:
            nonlocal rows
            shard = shards[rows % len(shards)]
            rows += 1
            starts = packed[shard].next_row(window)
            return starts, {str(shard): packed[shard].state_dict()}

        return next_row

    def state_at(self, rows: int) -> SamplerState | None:
        """Initial state for 0 rows; None otherwise, since positions require reading."""
        return None if rows else self.initial_state

    def source_name(self, row: int) -> str:
        """Empty, since there is one source."""
        return ""

    def epochs(self, state: SamplerState) -> dict[str, float]:
        """Epochs over the training documents, estimated from this rank's shards."""
        return {"": sum(self._streams[int(shard)].epochs(position) for shard, position in state.items()) / len(state)}

    def close(self) -> None:
        """Stop the prefetch threads."""
        if self._pool is not None:
            self._pool.close()


def _build_streams(
    data: DataConfig,
    source: Source,
    tokenizer: Tokenizer,
    own: range,
    pool: DaemonThreadPool | None,
    *,
    seed: int,
    held_out: float,
) -> dict[int, DocumentStream]:
    """Document streams of the virtual shards `own`."""
    shards = data.virtual_shards
    if isinstance(source, RandomAccessSource):
        documents = TokenizedDocuments(training_subset(source, held_out), tokenizer)
        order = EpochShuffle(len(documents), seed)
        return {shard: IndexedStream(documents, order, shard=shard, shards=shards) for shard in own}
    assert pool is not None
    if source.parts < shards:
        warnings.warn(
            f"data.virtual_shards={shards}, but the stream has {source.parts} independent parts, each of which is read "
            f"{math.ceil(shards / source.parts)} times; data.virtual_shards={source.parts} or less reads it once (in "
            "another order), and so does data.streaming=false",
            stacklevel=2,
        )
    order = EpochShuffle(source.parts, seed)
    spec = StreamSpec(source, tokenizer, order, seed, shards, data.shuffle_buffer, held_out)
    return {shard: BlockShuffledStream(spec, pool, shard) for shard in own}


def _check_complete(states: Mapping[str, dict[str, Any]], shards: int, dp_degree: int) -> None:
    """Check that all shards are present and stopped at the same row of the run."""
    if set(states) != set(map(str, range(shards))):
        raise UserError(f"The checkpoint's data state holds {len(states)} of {shards} virtual shards.")
    row = sum(state["rows"] for state in states.values())
    wrong = [shard for shard, state in states.items() if state["rows"] != len(range(int(shard), row, shards))]
    if wrong:
        raise UserError(
            f"The checkpoint's data state is inconsistent: virtual shard {wrong[0]} stopped at another row."
        )
    if row % dp_degree:
        raise UserError(f"The checkpoint stopped after {row} rows, which {dp_degree} data ranks cannot share evenly.")
