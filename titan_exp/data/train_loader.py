"""Batches to train on, for ever, in an order that depends on the experiment and its seed and on no layout.

Row j of the run comes from virtual shard j mod V, and data rank r of dp takes the rows j ≡ r (mod dp). dp divides V, so
rank r owns the shards ≡ r (mod dp) and nobody else needs their state: a checkpoint of all shards continues at any dp.
"""

import json
import math
import warnings
import weakref
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from titan_exp.config.data import DataConfig
from titan_exp.config.errors import UserError, Violation
from titan_exp.config.experiment import Experiment
from titan_exp.data.batch import Batch, assemble
from titan_exp.data.document_stream import DocumentStream, RandomAccessStream, TokenizedDocuments
from titan_exp.data.epoch_order import EpochOrder
from titan_exp.data.held_out import training_part
from titan_exp.data.packing import PackedShard
from titan_exp.data.prefetch import Prefetcher
from titan_exp.data.read_ahead import ReadAhead
from titan_exp.data.source import RandomAccessSource, Source, build_source, fingerprint, has_validation_split
from titan_exp.data.streamed_documents import StreamedCorpus, StreamedDocuments
from titan_exp.data.tokenizer import Tokenizer, build_tokenizer

_READ_AHEAD_THREADS = 8
_States = dict[int, dict[str, Any]]


class TrainLoader(Iterator[Batch]):
    """Micro-batches [micro_batch_size, seq_len] of one data rank, prepared ahead in a thread.

    Global batch k, counted from 0, is rows k·G to (k + 1)·G - 1 of the run in every layout (G = global_batch_size);
    a rank's micro-batches are consecutive groups of its rows. Raises UserError where the corpus or the tokenizer cannot
    be used; an error of the thread is raised by `next`.
    """

    def __init__(
        self, experiment: Experiment, *, dp_rank: int, dp_degree: int, micro_batch_size: int, pin_memory: bool
    ) -> None:
        assert experiment.data.virtual_shards % dp_degree == 0, "a rule of the configuration"
        assert experiment.training.global_batch_size % (dp_degree * micro_batch_size) == 0, (
            "a rule of the configuration"
        )
        self._experiment = experiment
        self._dp_rank, self._dp_degree = dp_rank, dp_degree
        self._micro_batch_size = micro_batch_size
        self._pin_memory = pin_memory
        tokenizer = build_tokenizer(experiment.data)
        source = build_source(experiment.data)
        self._corpus = _describe(experiment, source, tokenizer)
        own = range(dp_rank, experiment.data.virtual_shards, dp_degree)
        self._pool = None if isinstance(source, RandomAccessSource) else ReadAhead(min(_READ_AHEAD_THREADS, len(own)))
        if self._pool is not None:
            weakref.finalize(self, self._pool.close)  # a task that runs would keep the pool alive after its last user
        self._streams = _build_streams(experiment, source, tokenizer, own, self._pool)
        self._consumed: _States = {shard: {"rows": 0} for shard in own}
        self._prefetcher: Prefetcher[tuple[Batch, _States]] | None = None
        self._closed = False

    @property
    def fingerprint(self) -> str:
        """Identifies everything that a data state refers to: corpus, split, tokenizer, seed, number of shards."""
        return blake2b(json.dumps(self._corpus, sort_keys=True).encode(), digest_size=16).hexdigest()

    def __next__(self) -> Batch:
        """The next micro-batch. Raises RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError("the loader is closed")
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self._produce(), self._experiment.data.prefetch)
        batch, reached = next(self._prefetcher)
        self._consumed.update(reached)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch handed out, in JSON's types: an entry for each shard of this rank, and
        `corpus`, the same on every rank. `{**a, **b, ...}` over all ranks is what `load_state_dict` takes."""
        return {"corpus": self._corpus, **{str(shard): state for shard, state in self._consumed.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batches that the ranks of a run, of any dp degree, have consumed.

        `state` is the union of their `state_dict()`s at the end of a global batch. Raises UserError where it belongs to
        another corpus, or is not such a union.
        """
        _check_same_corpus(state.get("corpus"), self._corpus)
        consumed = {int(shard): dict(position) for shard, position in state.items() if shard != "corpus"}
        _check_complete(consumed, self._experiment.data.virtual_shards, self._dp_degree)
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None
        self._consumed = {shard: consumed[shard] for shard in self._streams}

    def epochs(self) -> float:
        """Passes over the training documents so far, estimated from this rank's shards."""
        return sum(self._streams[shard].passes(state) for shard, state in self._consumed.items()) / len(self._consumed)

    def close(self) -> None:
        """Stop the background threads; the loader gives no more batches, its state stays."""
        self._closed = True
        if self._pool is not None:
            self._pool.close()
        if self._prefetcher is not None:
            self._prefetcher.close()

    def _produce(self) -> Iterator[tuple[Batch, _States]]:
        """Batches from the consumed position on. The generator must not hold this object: see `Prefetcher`."""
        experiment = self._experiment
        shards = {shard: PackedShard(stream, experiment.training.seq_len) for shard, stream in self._streams.items()}
        for shard, state in self._consumed.items():
            shards[shard].load_state_dict(state)
        return _batches(
            shards,
            turns=_turns(shards, sum(state["rows"] for state in self._consumed.values())),
            window=experiment.training.seq_len + 1,
            rows=self._micro_batch_size,
            config=experiment.data,
            pin_for=torch.cuda.current_device() if self._pin_memory else None,
        )


def _turns(shards: Mapping[int, PackedShard], rows: int) -> Iterator[int]:
    """The shards of this rank's rows in order, after the first `rows` of them."""
    order = sorted(shards)
    while True:
        yield order[rows % len(order)]
        rows += 1


def _batches(
    shards: Mapping[int, PackedShard],
    *,
    turns: Iterator[int],
    window: int,
    rows: int,
    config: DataConfig,
    pin_for: int | None,
) -> Iterator[tuple[Batch, _States]]:
    """Micro-batches of `rows` rows, each with the states that its shards are in after it."""
    if pin_for is not None:
        torch.cuda.set_device(pin_for)  # a new thread is on GPU 0, where every rank would open a context
    for shard in shards.values():
        shard.prepare()
    while True:
        windows = np.empty((rows, window), dtype=np.int64)
        starts: list[list[int]] = []
        reached: _States = {}
        for row in windows:
            number = next(turns)
            starts.append(shards[number].next_row(row))
            reached[number] = shards[number].state_dict()
        batch = assemble(windows, starts, document_mask=config.document_mask, reset_positions=config.reset_positions)
        yield (batch if pin_for is None else batch.pin_memory()), reached


def _build_streams(
    experiment: Experiment, source: Source, tokenizer: Tokenizer, own: range, pool: ReadAhead | None
) -> dict[int, DocumentStream]:
    """The document stream of each of the virtual shards `own`."""
    seed, shards, held_out = experiment.experiment.seed, experiment.data.virtual_shards, _held_out(experiment)
    if isinstance(source, RandomAccessSource):
        documents = TokenizedDocuments(training_part(source, held_out), tokenizer)
        order = EpochOrder(len(documents), seed)
        return {shard: RandomAccessStream(documents, order, shard=shard, shards=shards) for shard in own}
    assert pool is not None
    if source.parts < shards:
        _warn_of_shared_parts(source.parts, shards)
    order = EpochOrder(source.parts, seed)
    corpus = StreamedCorpus(source, tokenizer, order, seed, shards, experiment.data.shuffle_buffer, held_out)
    return {shard: StreamedDocuments(corpus, pool, shard) for shard in own}


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
    """What positions in the data refer to; each key is the configuration key to blame where it differs."""
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


def _check_same_corpus(saved: object, present: Mapping[str, Any]) -> None:
    if not isinstance(saved, dict):
        raise UserError("The checkpoint holds no data state.")
    violations = [
        Violation(key, present.get(key), f"the checkpoint was made with {saved.get(key)}", "that one, or a new run")
        for key in sorted({*saved, *present})
        if saved.get(key) != present.get(key)
    ]
    if violations:
        raise UserError("The run cannot continue on other data.", violations)


def _check_complete(consumed: _States, shards: int, dp_degree: int) -> None:
    """Every shard must be there, and all must have stopped at the same row of the run."""
    if set(consumed) != set(range(shards)):
        raise UserError(f"The checkpoint's data state holds {len(consumed)} of {shards} virtual shards.")
    row = sum(state["rows"] for state in consumed.values())
    torn = [shard for shard, state in consumed.items() if state["rows"] != len(range(shard, row, shards))]
    if torn:
        raise UserError(f"The checkpoint's data state is torn: its virtual shard {torn[0]} stopped at another row.")
    if row % dp_degree:
        raise UserError(f"The checkpoint stopped after {row} rows, which {dp_degree} data ranks cannot share evenly.")
