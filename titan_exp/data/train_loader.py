"""Batches to train on, for ever, in an order that depends on the experiment and its seed and on no layout.

Data rank r of dp takes the rows j ≡ r (mod dp) of the run; which row is which is a `Sampler`'s to say.
"""

import json
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.data import DataConfig
from titan_exp.config.groups.experiment import Experiment
from titan_exp.data.batch import Batch, collate
from titan_exp.data.prefetch import Prefetcher
from titan_exp.data.sampler import RowReader, Sampler, SamplerState


class TrainLoader(Iterator[Batch]):
    """Micro-batches [micro_batch_size, seq_len] of one data rank, prepared ahead in a thread.

    Global batch k, counted from 0, is rows k·G to (k + 1)·G - 1 of the run in every layout (G = global_batch_size);
    a rank's micro-batches are consecutive groups of its rows. Raises UserError where the corpus or the tokenizer cannot
    be used; an error of the thread is raised by `next`.
    """

    def __init__(
        self, experiment: Experiment, *, dp_rank: int, dp_degree: int, micro_batch_size: int, pin_memory: bool
    ) -> None:
        assert experiment.training.global_batch_size % (dp_degree * micro_batch_size) == 0, (
            "a rule of the configuration"
        )
        self._experiment = experiment
        self._dp_degree = dp_degree
        self._micro_batch_size = micro_batch_size
        self._pin_memory = pin_memory
        self._sampler = build_sampler(experiment, dp_rank=dp_rank, dp_degree=dp_degree)
        self._consumed: SamplerState = dict(self._sampler.initial_state)
        self._prefetcher: Prefetcher[tuple[Batch, SamplerState]] | None = None
        self._closed = False

    @property
    def fingerprint(self) -> str:
        """Identifies everything that a data state refers to: corpus, split, tokenizer, seed, order."""
        return blake2b(json.dumps(self._sampler.corpus, sort_keys=True).encode(), digest_size=16).hexdigest()

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
        """The position after the last batch handed out, in JSON's types: an entry for each position that this rank
        keeps, and `corpus`, the same on every rank. `{**a, **b, ...}` over all ranks is what `load_state_dict` takes.
        """
        return {"corpus": self._sampler.corpus, **self._consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batches that the ranks of a run, of any dp degree, have consumed.

        `state` is the union of their `state_dict()`s at the end of a global batch. Raises UserError where it belongs to
        another corpus, or is not such a union.
        """
        _check_same_corpus(state.get("corpus"), self._sampler.corpus)
        self._go_to(self._sampler.restrict({key: position for key, position in state.items() if key != "corpus"}))

    def skip(self, global_batches: int) -> None:
        """Go from the beginning to after so many global batches: at once where the order allows, else by reading."""
        states = self._sampler.state_at(global_batches * self._experiment.training.global_batch_size)
        if states is not None:
            self._go_to(states)
            return
        self._go_to(dict(self._sampler.initial_state))
        rows = self._dp_degree * self._micro_batch_size
        for _ in range(global_batches * self._experiment.training.global_batch_size // rows):
            next(self)

    def source_name(self, row: int) -> str:
        """Name of the source that row `row` of the run is from; empty where there is one source."""
        return self._sampler.source_name(row)

    def epochs(self) -> float:
        """Passes over the training documents so far; estimated from this rank's share where they are streamed."""
        return self._sampler.epochs(self._consumed)[""]

    def epoch_metrics(self) -> dict[str, float]:
        """What a row of metrics says of it: `epoch`, and of a mixture also `epoch/NAME` of each source."""
        passes = self._sampler.epochs(self._consumed)
        return {f"epoch/{name}" if name else "epoch": value for name, value in passes.items()}

    def close(self) -> None:
        """Stop the background threads; the loader gives no more batches, its state stays."""
        self._closed = True
        self._sampler.close()
        if self._prefetcher is not None:
            self._prefetcher.close()

    def _go_to(self, states: SamplerState) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None
        self._consumed = dict(states)

    def _produce(self) -> Iterator[tuple[Batch, SamplerState]]:
        """Batches from the consumed position on. The generator must not hold this object: see `Prefetcher`."""
        return _batches(
            self._sampler.open(self._consumed),
            window=self._experiment.training.seq_len + 1,
            rows=self._micro_batch_size,
            config=self._experiment.data,
            pin_for=torch.cuda.current_device() if self._pin_memory else None,
        )


def build_sampler(experiment: Experiment, *, dp_rank: int, dp_degree: int) -> Sampler:
    """The rows of one data rank. Raises UserError where the corpus or the tokenizer cannot be used."""
    if experiment.data.source == "tokens":
        from titan_exp.data.token_store.window_sampler import WindowSampler

        return WindowSampler(experiment, dp_rank=dp_rank, dp_degree=dp_degree)
    from titan_exp.data.virtual_shards.sampler import VirtualShardSampler

    return VirtualShardSampler(experiment, dp_rank=dp_rank, dp_degree=dp_degree)


def _batches(
    reader: RowReader, *, window: int, rows: int, config: DataConfig, pin_for: int | None
) -> Iterator[tuple[Batch, SamplerState]]:
    """Micro-batches of `rows` rows, each with the positions that it has changed."""
    if pin_for is not None:
        torch.cuda.set_device(pin_for)  # a new thread is on GPU 0, where every rank would open a context
    reader.prepare()
    while True:
        windows = np.empty((rows, window), dtype=np.int64)
        starts: list[list[int]] = []
        reached: SamplerState = {}
        for row in windows:
            begins, changed = reader.next_row(row)
            starts.append(begins)
            reached.update(changed)
        batch = collate(windows, starts, document_mask=config.document_mask, reset_positions=config.reset_positions)
        yield (batch if pin_for is None else batch.pin_memory()), reached


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
