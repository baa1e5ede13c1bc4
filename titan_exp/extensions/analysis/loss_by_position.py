"""Loss by position: mean loss of tokens that have equally many tokens of context, in octaves."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from titan_exp.checkpoint.formats.open_checkpoint import OpenCheckpoint
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.data.batch import Batch
from titan_exp.inference.evaluate import require_whole_sequences
from titan_exp.ops.cross_entropy import IGNORE_INDEX, LossSum, log_normalizer_and_target
from titan_exp.parallel.mesh import Mesh
from titan_exp.trainer.objective import LanguageModeling, Loss

OCTAVES = 32  # number of octaves of positions; the last begins at 2³⁰
CHUNK = 4096  # number of tokens whose logits are in memory at once, if the model computes the loss itself


@dataclass(frozen=True)
class PositionLoss:
    """Mean loss of an octave of positions."""

    first: int  # first position: the number of tokens of its document before the predicting token
    last: int
    tokens: int
    loss: float  # mean over tokens, in nats


@dataclass(frozen=True)
class LossByPosition(LanguageModeling):
    """Language modeling that also sums losses by position, in evaluations where ranks have whole sequences."""

    sums: Tensor = field(default_factory=lambda: torch.zeros(2, OCTAVES, dtype=torch.float64))
    """Summed loss and number of predicted tokens by octave, on the model's device; calls fill it."""

    def __call__(self, model: nn.Module, batch: Batch, hidden: Tensor | None = None) -> Loss:
        """Compute the loss of a batch and add it to the sums by position."""
        self.sums.data = self.sums.to(batch.tokens.device)
        return super().__call__(model, batch, hidden)

    def chunked_loss(self, hidden: Tensor, weight: Tensor, batch: Batch) -> LossSum:
        """Loss, chunk by chunk, from last hidden states [batch, seq, dim] and the head's weight [vocab, dim]."""
        hidden, labels, octaves = hidden.flatten(0, 1), batch.labels.flatten(), octave(positions(batch)).flatten()
        chunks = [slice(start, start + CHUNK) for start in range(0, len(labels), CHUNK)]
        total = sum(self._add(hidden[chunk] @ weight.T, labels[chunk], octaves[chunk]) for chunk in chunks)
        assert isinstance(total, Tensor), "a batch has tokens"
        return LossSum(total, total)

    def loss(self, logits: Tensor, batch: Batch) -> Loss:
        """Loss from logits [batch, seq, vocab], or from this rank's vocabulary shard of them."""
        total = self._add(logits.flatten(0, 1), batch.labels.flatten(), octave(positions(batch)).flatten())
        return self.with_metrics(LossSum(total, total))

    def _add(self, logits: Tensor, labels: Tensor, octaves: Tensor) -> Tensor:
        predicted = labels != IGNORE_INDEX
        log_z, chosen = log_normalizer_and_target(logits, labels.where(predicted, 0), self.vocab_shard)
        losses = (log_z - chosen) * predicted
        self.sums.index_add_(1, octaves, torch.stack((losses, predicted.float())).double())
        return losses.sum()

    def octaves(self, mesh: Mesh) -> list[PositionLoss]:
        """Mean loss by octave over all data ranks; octaves without tokens are left out."""
        sums = self.sums.cpu()
        torch.distributed.all_reduce(sums, group=mesh.cpu_group)
        losses, tokens = (sums / mesh.loss_replicas).tolist()
        return [
            PositionLoss(2**index // 2, max(2**index - 1, 0), round(count), loss / count)
            for index, (loss, count) in enumerate(zip(losses, tokens, strict=True))
            if count
        ]


class Positions:
    """Observation of `titan-exp evaluate`: loss of tokens with 1, 2 to 3, 4 to 7, ... tokens before them."""

    def require(self, experiment: Experiment) -> None:
        """Raise UserError if the model reads no tokens, or a rank would not see whole sequences."""
        if not experiment.model.vocab_size:
            reason = f"{experiment.model.name} does not read tokens"
            raise UserError(f"--positions: {reason}. Leave the flag out to see its loss alone.")
        require_whole_sequences(experiment, "--positions", "cp")

    def begin(
        self, model: nn.Module, source: OpenCheckpoint, objective: LanguageModeling, mesh: Mesh
    ) -> LossByPosition:
        """Return the objective that sums the losses."""
        self._loss = LossByPosition(objective.chunk_tokens, vocab_shard=objective.vocab_shard)
        return self._loss

    def watch(self, batches: Mapping[str, Iterable[Batch]]) -> AbstractContextManager[Mapping[str, Iterable[Batch]]]:
        """Return the batches as they are."""
        return nullcontext(batches)

    def values(self, mesh: Mesh) -> list[dict[str, Any]]:
        """Fields of `PositionLoss`, over all data ranks."""
        return [asdict(octave) for octave in self._loss.octaves(mesh)]

    @staticmethod
    def lines(values: Sequence[dict[str, Any]], tokens: int) -> Iterator[str]:
        """Text of the values, a line for each octave."""
        return lines([PositionLoss(**octave) for octave in values])


def positions(batch: Batch) -> Tensor:
    """Number of earlier tokens that each token may attend to, in its document or its row, int64 [batch, seq]."""
    if batch.positions is not None:
        return batch.positions
    index = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
    if batch.documents is None:
        return index
    begins = torch.ones_like(batch.documents, dtype=torch.bool)
    begins[:, 1:] = batch.documents.diff() != 0
    return index - index.where(begins, 0).cummax(1).values


def octave(positions: Tensor) -> Tensor:
    """Octave of each position: position 0 is in octave 0, 1 in 1, 2 and 3 in 2, 4 to 7 in 3."""
    return torch.frexp(positions.double()).exponent.long()


def lines(octaves: Sequence[PositionLoss]) -> Iterator[str]:
    """Text of the losses, a line for each octave."""
    yield "loss by position (the number of earlier tokens of the same document):"
    for found in octaves:
        span = f"{found.first:,}" if found.first == found.last else f"{found.first:,} to {found.last:,}"
        yield f"  {span:>20}  {found.loss:.4f}  of {found.tokens:,} tokens"
