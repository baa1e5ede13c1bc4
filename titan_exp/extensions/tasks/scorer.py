"""Scorer: log-likelihoods of token rows under a parallel model, the same in every layout."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn

from titan_exp.config.groups.experiment import Experiment
from titan_exp.data.batch import Batch, SequencePart
from titan_exp.extensions.tasks.encoding import Row
from titan_exp.models.spec.lookup import model_spec
from titan_exp.ops.cross_entropy import LossSum, VocabShard, log_normalizer_and_target
from titan_exp.parallel.mesh import Mesh
from titan_exp.parallel.module_requirements import computes_loss
from titan_exp.parallel.tensor_parallel.styles import vocab_shard
from titan_exp.tracking.progress import PROGRESS
from titan_exp.trainer.forward_backward import Model
from titan_exp.trainer.objective import Loss

MULTIPLE = 64
"""Lengths of batches are multiples of it, and at most the sequence length."""
CHUNK = 4096
"""Largest number of tokens whose logits are in memory."""
NOT_SCORED = -1
"""Row number of a position that is not scored."""


class LogLikelihoods(NamedTuple):
    """Sums over the scored tokens of each row, the same on every rank."""

    total: np.ndarray
    """Log-likelihoods in nats, float64 [rows]."""
    greedy: np.ndarray
    """True where every scored token has the largest logit, of which the lowest id counts, bool [rows]."""


@dataclass(frozen=True)
class ScoredBatch(Batch):
    """Rows with the number of the row that each label is scored for, int64 [rows, seq], or `NOT_SCORED`."""

    numbers: Tensor = None  # type: ignore[assignment]  # given; a default must follow those of Batch

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the batch."""
        return [*super().tensors, self.numbers]

    def map(self, function: Callable[[Tensor], Tensor]) -> "ScoredBatch":
        """Apply a function to every tensor of the batch."""
        positions = None if self.positions is None else function(self.positions)
        return ScoredBatch(
            function(self.tokens), function(self.labels), positions, None, numbers=function(self.numbers)
        )

    def sharded(self, part: SequencePart) -> "ScoredBatch":
        """Take this rank's tokens."""
        return replace(self.map(part.take), positions=part.positions(self.tokens))


@dataclass(frozen=True)
class Scorer:
    """Scores rows by the model of a run, or by one that was loaded."""

    model: Model
    """Parallel model."""
    mesh: Mesh
    """Its mesh."""
    experiment: Experiment
    """Its configuration, with the sequence length that its tables are made for."""
    micro_batch_size: int
    """Sequences of `training.seq_len` whose tokens fit into a batch."""

    @torch.no_grad()
    def log_likelihoods(self, rows: Sequence[Row]) -> LogLikelihoods:
        """Score rows of at most `training.seq_len` + 1 tokens; all ranks must call it with the same rows."""
        objective = _Scoring(len(rows), self.mesh.device, self._shard, in_head=self._in_head)
        with self._scoring(objective):
            batches = self._batches(rows)
            while group := list(itertools.islice(batches, self.model.eval_microbatches)):
                self.model.loss_sum(group)
                PROGRESS.keep_alive()
        sums = objective.sums.cpu()
        dist.all_reduce(sums, group=self.mesh.cpu_group)
        sums /= self.mesh.loss_replicas
        expected = torch.tensor([len(row.tokens) - row.first for row in rows], dtype=torch.float64)
        assert torch.equal(sums[1], expected), "every token is scored once"
        return LogLikelihoods(sums[0].numpy(), (sums[2] == expected).numpy())

    @property
    def _shard(self) -> VocabShard | None:
        whole = not self.experiment.parallelism.loss_parallel
        return None if whole else vocab_shard(self.mesh, self.experiment.model.vocab_size)

    @property
    def _in_head(self) -> bool:
        """True if logits are computed of scored tokens alone, inside the model's forward."""
        spec = model_spec(self.experiment.model)
        last = self.model.parts[-1]
        return computes_loss(last, spec) and (self.experiment.parallelism.tp == 1 or self._shard is not None)

    @contextmanager
    def _scoring(self, objective: "_Scoring") -> Iterator[None]:
        """Put the objective in the place of the model's, in evaluation mode. Other lengths are not compiled for."""
        kept = self.model.objective
        for part in self.model.parts:
            part.eval()
        self.model.objective = objective
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            self.model.objective = kept
            for part in self.model.parts:
                part.train()

    def _batches(self, rows: Sequence[Row]) -> Iterator[ScoredBatch]:
        """This data rank's batches, as many as every other rank has, of the same shapes: the longest rows first, dealt
        one by one."""
        seq_len, mesh = self.experiment.training.seq_len, self.mesh
        # Hidden states between stages, and the parts of sequences, have one shape.
        fixed = mesh.pp_group is not None or mesh.sequence_shard.degree > 1
        order = sorted(range(len(rows)), key=lambda number: (-len(rows[number].tokens), number))
        while order:
            longest = -(-(len(rows[order[0]].tokens) - 1) // MULTIPLE) * MULTIPLE
            length = seq_len if fixed else min(longest, seq_len)
            size = self.micro_batch_size * (1 if fixed else max(1, seq_len // length))
            group, order = order[: size * mesh.dp_degree], order[size * mesh.dp_degree :]
            if not fixed:
                size = -(-len(group) // mesh.dp_degree)
            yield _batch([(number, rows[number]) for number in group[mesh.dp_rank :: mesh.dp_degree]], size, length)


def _batch(rows: Sequence[tuple[int, Row]], size: int, length: int) -> ScoredBatch:
    """Rows padded to `length`, and with empty rows to `size`."""
    tokens, labels = (np.zeros((size, length), dtype=np.int64) for _ in range(2))
    numbers = np.full((size, length), NOT_SCORED, dtype=np.int64)
    for place, (number, row) in enumerate(rows):
        read = len(row.tokens) - 1
        tokens[place, :read], labels[place, :read] = row.tokens[:-1], row.tokens[1:]
        numbers[place, row.first - 1 : read] = number
    made = map(torch.from_numpy, (tokens, labels, numbers))
    return ScoredBatch(next(made), next(made), None, None, numbers=next(made))


class _Scoring:
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
        inputs = (batch.tokens if hidden is None else hidden, batch.positions, batch.documents)
        if self._in_head:
            model(*inputs, loss=partial(self._from_hidden, batch))
        else:
            scored = batch.numbers != NOT_SCORED
            self._add(model(*inputs)[scored], batch.labels[scored], batch.numbers[scored])
        return Loss(self._nothing, {"loss": self._nothing})

    def _from_hidden(
        self, batch: ScoredBatch, hidden: Float[Tensor, "batch seq dim"], weight: Float[Tensor, "vocab dim"]
    ) -> LossSum:
        scored = batch.numbers != NOT_SCORED
        labels, numbers = batch.labels[scored], batch.numbers[scored]
        for part in zip(*(each.split(CHUNK) for each in (hidden[scored], labels, numbers)), strict=True):
            self._add(torch.nn.functional.linear(part[0], weight), *part[1:])
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
