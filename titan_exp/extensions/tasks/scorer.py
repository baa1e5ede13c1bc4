"""Scorer: log-likelihoods of token rows under a parallel model, the same in every layout."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from titan_exp.config.groups.experiment import Experiment
from titan_exp.data.batch import Batch, SequencePart
from titan_exp.extensions.tasks.encoding import EncodedTask, Row, RowBatch, row_batches
from titan_exp.extensions.tasks.scores import TaskScores, score
from titan_exp.models.spec.lookup import model_spec
from titan_exp.ops.cross_entropy import LossSum, VocabShard, log_normalizer_and_target
from titan_exp.parallel.mesh import Mesh
from titan_exp.parallel.meta_init import computes_loss
from titan_exp.parallel.tensor_parallel.styles import vocab_shard
from titan_exp.tracking.logging import PROGRESS
from titan_exp.trainer.forward_backward import Model, evaluating
from titan_exp.trainer.objective import Loss

CHUNK = 4096  # largest number of tokens whose logits are in memory


class LogLikelihoods(NamedTuple):
    """Sums over the scored tokens of each row or choice, the same on every rank."""

    total: np.ndarray  # log-likelihoods in nats, float64
    greedy: np.ndarray  # true where every scored token has the largest logit, of which the lowest id counts, bool


@dataclass(frozen=True)
class ScoredBatch(Batch):
    """Sequences, which may be scored for several rows, and the scored tokens of all of them."""

    scored: Tensor = None  # type: ignore[assignment]  # given; a default must follow those of Batch
    """Index of the position that predicts it, into the flattened batch, token, and number of the row of each scored
    token, int64 [3, scored]."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "ScoredBatch":
        """Apply a function to every tensor of the batch."""
        return replace(self, tokens=function(self.tokens), scored=function(self.scored))

    def sharded(self, part: SequencePart) -> "ScoredBatch":
        """Take this rank's tokens."""
        own = part.take(torch.arange(self.tokens.numel(), device=self.tokens.device).view_as(self.tokens))
        index = torch.full((self.tokens.numel(),), -1, device=own.device)
        index[own.flatten()] = torch.arange(own.numel(), device=own.device)
        scored = torch.cat((index[self.scored[:1]], self.scored[1:]))
        positions = part.positions(self.tokens)
        return replace(self, tokens=part.take(self.tokens), positions=positions, scored=self.held(scored))

    def held(self, scored: Tensor) -> Tensor:
        """Those of the scored tokens whose position is this rank's; that of others is negative."""
        return scored[:, scored[0] >= 0]


@dataclass(frozen=True)
class Scorer:
    """Scores rows by the model of a run, or by one that was loaded."""

    model: Model
    mesh: Mesh
    experiment: Experiment  # its configuration: batches have the tokens of its micro-batches

    def log_likelihoods(self, rows: Sequence[Row]) -> LogLikelihoods:
        """Score rows of at most `training.seq_len` + 1 tokens; all ranks must call it with the same rows."""
        with self.scoring(len(rows)) as objective:
            batches = self.batches(rows)
            while group := list(itertools.islice(batches, self.model.eval_microbatches)):
                self.model.loss_sum(group)
                PROGRESS.keep_alive()
        sums = objective.sums.cpu()
        torch.distributed.all_reduce(sums, group=self.mesh.cpu_group)
        sums /= self.mesh.loss_replicas
        expected = torch.tensor([len(row.tokens) - row.first for row in rows], dtype=torch.float64)
        assert torch.equal(sums[1], expected), "every token is scored once"
        return LogLikelihoods(sums[0].numpy(), (sums[2] == expected).numpy())

    @contextmanager
    def scoring(self, rows: int) -> Iterator["Scoring"]:
        """Objective for a number of rows in the place of the model's, in evaluation mode, without compiling."""
        kept, model, layout = self.model.objective, self.experiment.model, self.experiment.parallelism
        shard = vocab_shard(self.mesh, model.vocab_size) if layout.loss_parallel else None
        # Then logits are computed of scored tokens alone.
        in_head = computes_loss(self.model.parts[-1], model_spec(model)) and (layout.tp == 1 or shard is not None)
        self.model.objective = objective = Scoring(rows, self.mesh.device, shard, in_head=in_head)
        try:
            with evaluating(self.model), torch.compiler.set_stance("force_eager"):
                yield objective
        finally:
            self.model.objective = kept

    def batches(self, rows: Sequence[Row]) -> Iterator[ScoredBatch]:
        """This data rank's batches."""
        dealt = row_batches(rows, self.experiment, (self.mesh.dp_rank, self.mesh.dp_degree))
        return (_batch(rows, batch) for batch in dealt)


def _batch(rows: Sequence[Row], batch: RowBatch) -> ScoredBatch:
    tokens = np.zeros((batch.size, batch.length), dtype=np.int64)
    scored = list[np.ndarray]()
    for place, group in enumerate(batch.groups):
        tokens[place, : len(rows[group[0]].tokens) - 1] = rows[group[0]].tokens[:-1]
        for number in group:
            row = rows[number]
            at = np.arange(row.first - 1, len(row.tokens) - 1)
            scored.append(np.stack((place * batch.length + at, row.tokens[row.first :], np.full_like(at, number))))
    whole = np.concatenate(scored or [np.zeros((3, 0), dtype=np.int64)], axis=1)
    given = torch.from_numpy(tokens)
    return ScoredBatch(given, given, None, None, scored=torch.from_numpy(whole.astype(np.int64)))


class Scoring:
    """Objective that adds up log-likelihood, number and greedy hits of scored tokens by row, fp64 [3, rows]."""

    metrics: Mapping[str, Any] = {}

    def __init__(self, rows: int, device: torch.device, shard: VocabShard | None, *, in_head: bool) -> None:
        self.sums = torch.zeros(3, rows, dtype=torch.float64, device=device)
        self._shard, self._in_head = shard, in_head
        self._nothing = torch.zeros((), device=device)

    def count(self, batch: Batch) -> int:
        """No tokens are counted."""
        return 0

    def __call__(self, model: nn.Module, batch: ScoredBatch, hidden: Tensor | None = None) -> Loss:
        """Score a batch; the loss is 0."""
        inputs = (batch.tokens if hidden is None else hidden, batch.positions, batch.documents)
        if self._in_head:
            model(*inputs, loss=partial(self._from_hidden, batch))
        else:
            places, *scored = batch.scored
            self._add(model(*inputs).flatten(0, 1)[places], *scored)
        return Loss(self._nothing, {"loss": self._nothing})

    def _from_hidden(
        self, batch: ScoredBatch, hidden: Float[Tensor, "batch seq dim"], weight: Float[Tensor, "vocab dim"]
    ) -> LossSum:
        hidden = hidden.flatten(0, 1)
        for places, *scored in batch.scored.split(CHUNK, dim=1):
            self._add(torch.nn.functional.linear(hidden[places], weight), *scored)
        return LossSum(self._nothing, self._nothing)

    def _add(
        self, logits: Float[Tensor, "tokens vocab"], labels: Int[Tensor, " tokens"], numbers: Int[Tensor, " tokens"]
    ) -> None:
        if not len(labels):
            return
        log_z, chosen = log_normalizer_and_target(logits, labels, self._shard)
        hits = _largest(logits.float(), self._shard) == labels
        values = torch.stack(((chosen - log_z).double(), torch.ones_like(log_z).double(), hits.double()))
        self.sums.index_add_(1, numbers, values)


def _largest(logits: Float[Tensor, "tokens vocab"], shard: VocabShard | None) -> Int[Tensor, " tokens"]:
    """Lowest id with the largest logit, over all shards."""
    value, index = logits.amax(dim=-1), logits.argmax(dim=-1)
    if shard is None:
        return index
    whole = shard.all_reduce_max(value)
    # Ids are exact in fp32 below 2²⁴.
    own = torch.where(value == whole, -(index + shard.first).float(), -torch.inf)
    return -shard.all_reduce_max(own).long()


def scores_of(scorer: Scorer, tasks: Sequence[EncodedTask]) -> list[TaskScores]:
    """Score tasks together, so that rows of equal length share batches; all ranks must call it."""
    lists = [rows for one in tasks for rows in (one.rows, one.neutral)]
    total, greedy = scorer.log_likelihoods([row for rows in lists for row in rows])
    ends = np.cumsum([len(rows) for rows in lists])[:-1]
    parts = [*map(LogLikelihoods, np.split(total, ends), np.split(greedy, ends))]
    return [
        score(one, *cells(one, one.rows, own), cells(one, one.neutral, neutral).total if one.neutral else None)
        for one, own, neutral in zip(tasks, parts[::2], parts[1::2], strict=True)
    ]


def cells(task: EncodedTask, rows: Sequence[Row], found: LogLikelihoods) -> LogLikelihoods:
    """Log-likelihoods of all rows of each choice, and True if each of them is greedy, [items, choices]."""
    place = tuple(np.array([(row.item, row.choice) for row in rows]).T)
    total, hits, counts = (np.zeros(task.windows.shape, dtype) for dtype in (np.float64, np.int64, np.int64))
    for cell, values in ((total, found.total), (hits, found.greedy), (counts, np.ones(len(rows), np.int64))):
        np.add.at(cell, place, values)
    assert rows is not task.rows or np.array_equal(counts, task.windows), "every window has its score once"
    return LogLikelihoods(total, (hits == counts) & (counts > 0))
