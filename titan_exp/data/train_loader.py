"""Training data loader: endless micro-batches in an order independent of the layout, and a preview of a batch.

Of each dp consecutive rows of the run, rank r takes row r; a `Sampler` defines the rows.
"""

import json
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.schema.data_sets import source_member
from titan_exp.data import token_store
from titan_exp.data.batch import Batch, MicroBatch, NextRow, RowBuffer, Sampler, SamplerState, collate
from titan_exp.data.shard_sampler import VirtualShardSampler
from titan_exp.data.source_check import training_subset
from titan_exp.data.sources import base
from titan_exp.data.tokenizers import Tokenizer, build_tokenizer
from titan_exp.ops.cross_entropy import IGNORE_INDEX

Item = TypeVar("Item")
_JOIN_TIMEOUT_SECONDS = 5.0


class Prefetcher(Iterator[Item]):
    """Iterator that prefetches up to `depth` items in a thread; the thread's exception is raised after its items."""

    def __init__(self, items: Iterator[Item], depth: int) -> None:
        self._queue = _Queue[Item](depth)
        # The thread references only the queue, so that dropping this object ends the thread.
        thread = threading.Thread(target=_fill, args=(items, self._queue), name="titan_exp-prefetch", daemon=True)
        self.close = weakref.finalize(self, _stop, self._queue, thread)
        """Stop the thread; idempotent."""
        thread.start()

    def __next__(self) -> Item:
        """Next item; StopIteration after the last one or after `close`."""
        return self._queue.get()


class _Queue(Generic[Item]):
    """Bounded queue; `end` wakes producer and consumer, and `get` on an empty ended queue raises the end reason."""

    def __init__(self, depth: int) -> None:
        self._items, self._depth = deque[Item](), depth
        self._end_reason: BaseException | None = None
        self._changed = threading.Condition()

    def put(self, item: Item) -> bool:
        """Wait for space and append; returns False once the queue has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._end_reason is not None or len(self._items) < self._depth)
            if self._end_reason is not None:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def get(self) -> Item:
        with self._changed:
            self._changed.wait_for(lambda: self._end_reason is not None or len(self._items) > 0)
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            assert self._end_reason is not None
            raise self._end_reason

    def end(self, reason: BaseException, *, drop_items: bool = False) -> None:
        with self._changed:
            self._end_reason = self._end_reason or reason
            if drop_items:
                self._items.clear()
            self._changed.notify_all()


def _fill(items: Iterator[Item], queue: "_Queue[Item]") -> None:
    reason: BaseException = StopIteration()
    try:
        for item in items:
            if not queue.put(item):
                break
    except BaseException as error:
        reason = error
    queue.end(reason)


def _stop(queue: _Queue, thread: threading.Thread) -> None:
    queue.end(StopIteration(), drop_items=True)
    if thread is not threading.current_thread():
        thread.join(_JOIN_TIMEOUT_SECONDS)


def build_text_sampler(data: DataConfig, seq_len: int, seed: int, *, dp_rank: int, dp_degree: int) -> Sampler:
    """Open a text as a sampler. Raises UserError if the corpus or the tokenizer cannot be used."""
    tokenizer, source = build_tokenizer(data), base.build_source(data)
    stored = token_store.stored_text(data, source, tokenizer)
    if stored is None:
        return VirtualShardSampler(data, seq_len, seed, dp_rank=dp_rank, dp_degree=dp_degree, source=source)
    corpus: dict[str, Any] = {
        "data.source": base.fingerprint(source, data),
        **base.content_identity(source),
        "data.tokenizer": tokenizer.fingerprint,
        "data.validation_fraction": base.held_out_fraction(data),
        base.STREAMING: False,
        "experiment.seed": seed,
        "training.seq_len": seq_len,
    }
    manifest = stored.make()
    tokens = token_store.TokenSplit(manifest, "train")
    if len(tokens) == 0:
        training_subset(stored.source, base.held_out_fraction(data))  # raises if all documents are held out
        raise UserError(f"The corpus has no text: all of its {len(stored.source)} documents are empty.")
    windows: token_store.Windows = token_store.RepeatedTokens(tokens, seq_len)
    if len(tokens) > seq_len:
        windows = token_store.ShuffledWindows(manifest, seq_len, seed, 0)
    mixture = token_store.Mixture([1.0])
    return token_store.WindowSampler({"": windows}, mixture, corpus, dp_rank=dp_rank, dp_degree=dp_degree)


class TrainLoader(Iterator[Any]):
    """Loader of one data rank's micro-batches (`Batch`, or the source's own kind), which a thread prefetches.

    In every layout, the global batch of a step has the rows of the run that follow those of all earlier steps. A rank's
    micro-batches are consecutive groups of its rows. Raises UserError if the corpus or the tokenizer cannot be used;
    `next` raises errors of the thread. `mtp_depth` is as in `Batch.with_further`; `prepare` is applied to every
    micro-batch in the thread.
    """

    def __init__(
        self,
        data: DataConfig,
        training: TrainingConfig,
        seed: int,
        *,
        dp_rank: int,
        dp_degree: int,
        micro_batch_size: int,
        pin_memory: bool,
        mtp_depth: int = 0,
        prepare: Callable[[Any], MicroBatch] | None = None,
    ) -> None:
        rows = dp_degree * micro_batch_size
        assert all(size % rows == 0 for size in training.batch_sizes), "checked by the rules"
        self._data, self._seq_len = data, training.seq_len
        self._dp_degree, self._micro_batch_size = dp_degree, micro_batch_size
        self._pin_memory, self._mtp_depth, self._prepare = pin_memory, mtp_depth, prepare
        build_sampler = source_member(data.source, "build_sampler") or build_text_sampler
        order = {"seq_len": training.seq_len, "seed": seed, "dp_rank": dp_rank, "dp_degree": dp_degree}
        self._build = partial(partial, data=data, **order)
        self._sampler: Sampler = self._build(build_sampler)()
        self._consumed: SamplerState = dict(self._sampler.initial_state)
        self._prefetcher: Prefetcher[tuple[MicroBatch, SamplerState]] | None = None
        self._closed = False

    @property
    def corpus(self) -> dict[str, Any]:
        """Identity of the data, by config key; equal on all ranks."""
        return self._sampler.corpus

    @property
    def fingerprint(self) -> str:
        """Digest of the identity that a data state refers to: corpus, split, tokenizer, seed, order."""
        return blake2b(json.dumps(self._sampler.corpus, sort_keys=True).encode(), digest_size=16).hexdigest()

    def __next__(self) -> Any:
        """Next micro-batch. Raises RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError("the loader is closed")
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self._batches(), self._data.prefetch)
        batch, positions = next(self._prefetcher)
        self._consumed.update(positions)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """JSON-serializable position after the last consumed batch: this rank's sampler positions, and `corpus`, equal
        on all ranks. Ranks that share a position agree on it at the end of a global batch. `load_state_dict` takes the
        union over all ranks."""
        return {"corpus": self._sampler.corpus, **self._consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after the batches consumed by all ranks of a run, under any dp degree. `state` is the union of their
        `state_dict()`s at the end of a global batch. Raises UserError if it belongs to another corpus, or ranks are
        missing."""
        self._keep_order(state)
        saved, present = state.get("corpus"), self._sampler.corpus
        if not isinstance(saved, dict):
            raise UserError("The checkpoint has no state of the data.")
        if base.CONTENT in present and base.CONTENT not in saved:
            base.warn(
                "This checkpoint is from a version that did not record the contents of data files. We compare their "
                "names and sizes only"
            )
        base.require_same_data(saved, present, {*saved, *present} - {base.REVISION, *({base.CONTENT} - set(saved))})
        self._seek(self._sampler.restrict(_positions(state)))

    def seek(self, state: Mapping[str, Any]) -> None:
        """Resume after the batches consumed by this rank, or by the same rank of another world of the run."""
        self._keep_order(state)
        self._seek(_positions(state))

    def skip(self, rows: int) -> None:
        """Seek to the state after `rows` rows of the run, whole micro-batches. Virtual shards must read them."""
        state = self._sampler.state_at(rows)
        self._seek(dict(self._sampler.initial_state) if state is None else state)
        if state is None:
            for _ in range(rows // (self._dp_degree * self._micro_batch_size)):
                next(self)

    @property
    def guarantee(self) -> str:
        """Sentence about the tokens that an epoch reads, for the log; empty if it reads each token once."""
        return getattr(self._sampler, "guarantee", "")

    def source_name(self, row: int) -> str:
        """Source of a row of the run; empty for a single source."""
        return self._sampler.source_name(row)

    def epochs(self) -> float:
        """Epochs completed; estimated from this rank's shards for streams."""
        return self._sampler.epochs(self._consumed)[""]

    def epoch_metrics(self) -> dict[str, float]:
        """Metrics `epoch` and, for a mixture, `epoch/NAME` of each source."""
        epochs = self._sampler.epochs(self._consumed)
        return {f"epoch/{name}" if name else "epoch": value for name, value in epochs.items()}

    def close(self) -> None:
        """Stop the background threads; the state remains readable."""
        self._closed = True
        self._sampler.close()
        if self._prefetcher is not None:
            self._prefetcher.close()

    def _keep_order(self, state: Mapping[str, Any]) -> None:
        """Read in the order of a saved state: virtual shards, or mixtures with rounded shares."""
        saved, present = state.get("corpus"), self._sampler.corpus
        if not isinstance(saved, dict):
            return
        if base.STREAMING in present and base.SHARDS in saved:
            base.warn(
                "This checkpoint is from a version that tokenized all texts while training. The run continues in that "
                "order, in which an epoch is not an exact pass over the data. To begin in the order of today, start a "
                "new run with checkpoint.continue_data=restart"
            )
            self._sampler = self._build(VirtualShardSampler)()
        elif base.MIXTURE in present and base.MIXTURE not in saved:
            base.warn(
                "This checkpoint is from a version that rounded shares of mixtures to multiples of 1/65,536. The run "
                "continues in that order, in which stores may end an epoch some rows apart. For exact shares, start a "
                "new run with checkpoint.continue_data=restart"
            )
            self._sampler = self._build(partial(token_store.build_store_sampler, rounded=True))()
        elif base.STREAMING in saved and base.SHARDS in present:
            reason = "this run tokenized its documents before training, and a stream has them in another order"
            remedy = "use data.streaming=false, or start a new run with checkpoint.continue_data=restart"
            violation = Violation(base.STREAMING, self._data.streaming, reason, remedy)
            raise UserError("The run cannot continue in another order.", [violation])

    def _seek(self, state: SamplerState) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None
        self._consumed = dict(state)

    def _batches(self) -> Iterator[tuple[MicroBatch, SamplerState]]:
        # The generator must not reference this object (see `Prefetcher`).
        windows = partial(_Windows, seq_len=self._seq_len, data=self._data, mtp_depth=self._mtp_depth)
        return _read_batches(
            self._sampler.open(self._consumed),
            partial(getattr(self._sampler, "rows", windows), self._micro_batch_size),
            pin_device=torch.cuda.current_device() if self._pin_memory else None,
            prepare=self._prepare,
        )


class _Windows:
    def __init__(self, rows: int, *, seq_len: int, data: DataConfig, mtp_depth: int) -> None:
        self._windows = np.empty((rows, seq_len + 1), dtype=np.int64)
        self._data, self._mtp_depth = data, mtp_depth

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self._windows)

    def collate(self, starts: Sequence[Sequence[int]]) -> Batch:
        data = self._data
        batch = collate(self._windows, starts, document_mask=data.document_mask, reset_positions=data.reset_positions)
        return batch.with_further(self._mtp_depth)


def _read_batches(
    next_row: NextRow,
    new_rows: Callable[[], RowBuffer],
    *,
    pin_device: int | None,
    prepare: Callable[[Any], MicroBatch] | None,
) -> Iterator[tuple[MicroBatch, SamplerState]]:
    if pin_device is not None:
        torch.cuda.set_device(pin_device)  # a new thread starts on GPU 0, where every rank would open a context
    while True:
        rows = new_rows()
        starts, positions = list[list[int]](), SamplerState()
        for row in rows:
            row_starts, changed = next_row(row)
            starts.append(row_starts)
            positions.update(changed)
        batch = rows.collate(starts)
        if prepare is not None:
            batch = prepare(batch)
        yield (batch if pin_device is None else batch.pin_memory()), positions


def _positions(state: Mapping[str, Any]) -> SamplerState:
    return {key: position for key, position in state.items() if key != "corpus"}


_MAX_TEXT = 200


def preview(data: DataConfig, training: TrainingConfig, seed: int, step: int) -> Iterator[str]:
    """Describe the global batch of a step, counted from 1 as in the metrics, as lines of text. A row is shown with its
    number in the run and its source. Each of its documents has token range, positions, tokens without a label, and
    text, shortened in the middle. Token stores are read at the step, other sources from the beginning."""
    rows, first = training.batch_size_at(step), training.sequences_after(step - 1)
    size = math.gcd(*training.batch_sizes)
    loader = TrainLoader(data, training, seed, dp_rank=0, dp_degree=1, micro_batch_size=size, pin_memory=False)
    tokenizer = build_tokenizer(data)
    try:
        loader.skip(first)
        epoch = loader.epochs()
        batches = [next(loader) for _ in range(rows // size)]
        predicted = sum(int((batch.labels != IGNORE_INDEX).sum()) for batch in batches)
        source = " ".join(data.paths) or data.source
        yield (
            f"step {step}: {rows} rows of {training.seq_len} tokens, {predicted:,} of {rows * training.seq_len:,} "
            f"predict the next one; epoch {epoch:.3f} of {source}"
        )
        for row in range(rows):
            number = first + row
            source = loader.source_name(number)
            yield ""
            yield f"row {number}" + (f", from {source}" if source else "")
            yield from _documents(batches[row // size], row % size, tokenizer)
    finally:
        loader.close()


def _documents(batch: Batch, row: int, tokenizer: Tokenizer) -> Iterator[str]:
    """Lines for the documents of a row, split at end-of-text tokens; two per document."""
    tokens, labels = batch.tokens[row], batch.labels[row]
    positions = torch.arange(len(tokens)) if batch.positions is None else batch.positions[row]
    ends = (tokens == tokenizer.end_of_text).nonzero().flatten().tolist()
    begin = 0
    for end in [*(end + 1 for end in ends), len(tokens)]:
        if end <= begin:
            continue
        ignored = (labels[begin:end] == IGNORE_INDEX).nonzero().flatten() + begin
        notes = [f"positions {int(positions[begin])}–{int(positions[end - 1])}"]
        if batch.documents is not None:
            notes.append(f"attends within document {int(batch.documents[row, begin])}")
        if len(ignored):
            notes.append(f"no label: {_ranges(ignored.tolist())}")
        complete = int(tokens[end - 1]) == tokenizer.end_of_text
        text = tokenizer.decode(tokens[begin:end].tolist())
        if (more := len(text) - _MAX_TEXT) > 0:
            text = f"{text[: _MAX_TEXT // 2]} ⟨{more:,} more characters⟩ {text[-_MAX_TEXT // 2 :]}"
        yield f"  tokens {begin}–{end - 1}, {', '.join(notes)}"
        yield f"    {text!r}{' ⟨end of text⟩' if complete else ' …'}"
        begin = end


def _ranges(numbers: list[int]) -> str:
    """Format ascending numbers as ranges, `3, 5–9`."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"{first}–{last}" if last > first else f"{first}" for first, last in ranges)
