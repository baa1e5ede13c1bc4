"""Virtual-shard sampler: rows of documents tokenized during training.

Row j of the run comes from virtual shard j mod V, in every layout. With g = gcd(V, dp), a rank reads all rows of V / g
shards and keeps one of every dp / g rows. If dp divides V, no other rank reads these shards. Otherwise dp / g ranks
read each shard, and are at the same position after every dp rows of the run. A checkpoint of all shards resumes under
any dp degree.
"""

import math
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.schema.foreign_code import sources
from titan_exp.data import virtual_shards
from titan_exp.data.batch import NextRow, SamplerState
from titan_exp.data.source_check import training_subset
from titan_exp.data.sources import base
from titan_exp.data.tokenizers import Tokenizer, build_tokenizer

_READ_AHEAD_THREADS = 8


class VirtualShardSampler:
    """`Sampler` over the virtual shards of one rank. Raises UserError if the corpus or the tokenizer cannot be used."""

    def __init__(
        self,
        data: DataConfig,
        seq_len: int,
        seed: int,
        *,
        dp_rank: int,
        dp_degree: int,
        source: base.Source | None = None,
    ) -> None:
        self._shards, self._dp_rank = data.virtual_shards, dp_rank
        self._stride = math.gcd(self._shards, dp_degree)
        self._readers = dp_degree // self._stride  # number of ranks that read each shard
        self._seq_len = seq_len
        tokenizer = build_tokenizer(data)
        source = base.build_source(data) if source is None else source
        held_out = base.held_out_fraction(data)
        self.corpus = {
            "data.source": base.fingerprint(source, data),
            **base.content_identity(source),
            "data.tokenizer": tokenizer.fingerprint,
            "data.validation_fraction": held_out,
            base.SHARDS: self._shards,
            "experiment.seed": seed,
        }
        self._pool: virtual_shards.DaemonThreadPool | None = None
        if not isinstance(source, base.RandomAccessSource):
            self.corpus["data.shuffle_buffer"] = data.shuffle_buffer
            self._pool = virtual_shards.DaemonThreadPool(min(_READ_AHEAD_THREADS, self._shards // self._stride))
            weakref.finalize(self, self._pool.close)  # a running task would keep the pool alive
        self._exact = _exact_remedy(data, source)
        self._stream = _stream_builder(data, source, tokenizer, self._pool, seed=seed, held_out=held_out)
        self.initial_state: SamplerState = {str(shard): {"rows": 0} for shard in self._own_shards(0)}

    @property
    def guarantee(self) -> str:
        """Sentence about the tokens that an epoch reads."""
        unit = "documents" if self._pool is None else "files"
        return (
            f"data: this run tokenizes while it trains, in {self._shards} virtual shards. Each reads all its {unit} "
            "before it repeats one, and those with fewer tokens repeat sooner. So an epoch is not an exact pass, and "
            f"its number an estimate. {self._exact}"
        )

    def restrict(self, states: Mapping[str, dict[str, Any]]) -> SamplerState:
        """Select the positions of the shards that this rank reads."""
        row = _check_complete(states, self._shards)
        return {str(shard): dict(states[str(shard)]) for shard in self._own_shards(row)}

    def open(self, state: SamplerState) -> NextRow:
        """Open a reader that takes one row per shard in turn. Only one may be in use: it moves the streams."""
        shards = sorted(map(int, state))
        packed = {shard: virtual_shards.PackedStream(self._stream(shard), self._seq_len) for shard in shards}
        for shard in shards:
            packed[shard].load_state_dict(state[str(shard)])
        for shard in shards:
            self._stream(shard).prefetch()
        rows = sum(position["rows"] for position in state.values())
        readers, own_turn = self._readers, self._dp_rank // self._stride

        # The reader must not refer to the sampler, whose collection closes the pool that a reading thread may wait for.
        def next_row(window: np.ndarray) -> tuple[list[int], SamplerState]:
            nonlocal rows
            starts: list[int] = []
            moved = [shards[(rows + turn) % len(shards)] for turn in range(readers)]
            for turn, shard in enumerate(moved):
                if turn == own_turn:
                    starts = packed[shard].next_row(window)
                else:
                    packed[shard].skip_row()
            rows += readers
            return starts, {str(shard): packed[shard].state_dict() for shard in moved}

        return next_row

    def _own_shards(self, row: int) -> range:
        """Shards that this rank reads if the ranks start at this row of the run."""
        return range((row + self._dp_rank) % self._stride, self._shards, self._stride)

    def state_at(self, rows: int) -> SamplerState | None:
        """Initial state for 0 rows; otherwise None, since only reading can tell the positions."""
        return None if rows else self.initial_state

    def source_name(self, row: int) -> str:
        """Empty, because there is one source."""
        return ""

    def epochs(self, state: SamplerState) -> dict[str, float]:
        """Epochs over the training documents, estimated from this rank's shards."""
        return {"": sum(self._stream(int(shard)).epochs(position) for shard, position in state.items()) / len(state)}

    def close(self) -> None:
        """Stop the prefetch threads."""
        if self._pool is not None:
            self._pool.close()


def _stream_builder(
    data: DataConfig,
    source: base.Source,
    tokenizer: Tokenizer,
    pool: virtual_shards.DaemonThreadPool | None,
    *,
    seed: int,
    held_out: float,
) -> Callable[[int], virtual_shards.DocumentStream]:
    """Return a function that builds the document stream of a virtual shard, on first use."""
    shards = data.virtual_shards
    if isinstance(source, base.RandomAccessSource):
        documents = virtual_shards.TokenizedDocuments(training_subset(source, held_out), tokenizer)
        order = virtual_shards.EpochShuffle(len(documents), seed)
        return cache(lambda shard: virtual_shards.IndexedStream(documents, order, shard=shard, shards=shards))
    assert pool is not None
    if source.parts < shards:
        base.warn(
            f"data.virtual_shards={shards}, but the stream has {source.parts} independent parts, so the run reads each "
            f"of them {math.ceil(shards / source.parts)} times. To read it once, in another order, use "
            f"data.virtual_shards={source.parts} or less{', or data.streaming=false' if data.streaming else ''}"
        )
    order = virtual_shards.EpochShuffle(source.parts, seed)
    spec = virtual_shards.StreamSpec(source, tokenizer, order, seed, shards, data.shuffle_buffer, held_out)
    return cache(lambda shard: virtual_shards.BlockShuffledStream(spec, pool, shard))


def _exact_remedy(data: DataConfig, source: base.Source) -> str:
    if not isinstance(source, base.RandomAccessSource):
        return "Make a store with titan-exp tokenize: an epoch of it reads each token once"
    if data.streaming:
        return "With data.streaming=false it reads each token once"
    if data.source not in sources() and not isinstance(getattr(source, "fingerprint", None), str):
        then = "Then the run tokenizes them once, and an epoch reads each token once (titan-exp help own-data)"
        return f"Give {data.source} a fingerprint that changes with its documents. {then}"
    return "Make a store with titan-exp tokenize, as for any text of this size: an epoch of it reads each token once"


def _check_complete(states: Mapping[str, dict[str, Any]], shards: int) -> int:
    """Check that all shards are present and at the same row of the run; returns that row."""
    if set(states) != set(map(str, range(shards))):
        raise UserError(f"The checkpoint has the positions of {len(states)} of {shards} virtual shards.")
    row = sum(state["rows"] for state in states.values())
    wrong = [shard for shard, state in states.items() if state["rows"] != len(range(int(shard), row, shards))]
    if wrong:
        shard = f"virtual shard {wrong[0]} stopped at another row"
        raise UserError(f"The positions in the checkpoint contradict each other: {shard}.")
    return row
