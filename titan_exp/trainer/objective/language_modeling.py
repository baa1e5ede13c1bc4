"""Language modeling: token cross-entropy plus z-loss, on whole logits or in chunks of tokens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from titan_exp.config.groups.training import TrainingConfig
from titan_exp.data.batch import Batch
from titan_exp.ops.loss.cross_entropy import IGNORE_INDEX, LossSum, VocabShard, loss_sum
from titan_exp.ops.loss.linear_cross_entropy import ChunkFunctions, linear_loss_sum
from titan_exp.trainer.objective.base import Loss, Reduction


@dataclass(frozen=True)
class LanguageModeling:
    """Next-token cross-entropy. Subclasses override `loss`, and `metrics` for what they report."""

    takes_vocab_shard: ClassVar[bool] = False
    """True in a subclass whose own `loss` or `__call__` computes with `vocab_shard`; others take whole logits only."""
    chunk_tokens: int | None = None
    """Tokens per chunk of logits; None computes all logits at once."""
    z_loss: float = 0.0
    """Coefficient of log(Z)²."""
    vocab_shard: VocabShard | None = None
    """This rank's shard of the logits under loss parallelism."""
    loss_sum: Callable[..., LossSum] = loss_sum
    """Loss of whole logits, compiled or eager."""
    chunk_functions: ChunkFunctions = field(default_factory=ChunkFunctions)
    """Loss and gradient of a chunk's logits, compiled or eager."""

    @classmethod
    def build(
        cls,
        config: TrainingConfig,
        vocab_shard: VocabShard | None = None,
        *,
        compile_backend: str | None = None,
        **options: Any,
    ) -> Self:
        """Build from the training group; `options` are fields of a subclass."""
        chunk_tokens = config.loss_chunk_tokens
        assert chunk_tokens != "auto", "resolved by build_objective"
        objective = cls(chunk_tokens, config.z_loss, vocab_shard, **options)
        return objective if compile_backend is None else objective.compiled(compile_backend)

    def compiled(self, backend: str) -> Self:
        """The same objective with compiled loss functions.

        Shapes are static, with one graph per chunk length, because a dynamic graph would slow full chunks down.
        """
        compile_ = partial(torch.compile, backend=backend, fullgraph=True, dynamic=False)
        return replace(self, loss_sum=compile_(self.loss_sum), chunk_functions=self.chunk_functions.compiled(compile_))

    @property
    def metrics(self) -> Mapping[str, Reduction]:
        """The z-loss term, if it has a coefficient: the differentiated mean is `loss` plus it."""
        return {"z_loss": "mean"} if self.z_loss else {}

    def count(self, batch: Batch) -> int:
        """Predicted tokens."""
        return int((batch.labels != IGNORE_INDEX).sum())

    def __call__(self, model: nn.Module, batch: Batch, hidden: Tensor | None = None) -> Loss:
        """Compute the loss of a batch. Chunks run inside the model's forward, where FSDP has gathered the LM head."""
        inputs = (batch.tokens if hidden is None else hidden, batch.positions, batch.documents)
        if self.chunk_tokens is None:
            return self.loss(model(*inputs), batch)
        return self.with_metrics(model(*inputs, loss=partial(self.chunked_loss, batch=batch)))

    def chunked_loss(self, hidden: Tensor, weight: Tensor, batch: Batch) -> LossSum:
        """Loss in chunks, from the last hidden states [batch, seq, dim] and the head's weight [vocab, dim]."""
        assert self.chunk_tokens is not None, "whole logits are given to `loss`"
        return linear_loss_sum(
            hidden,
            weight,
            batch.labels,
            chunk_tokens=self.chunk_tokens,
            z_loss=self.z_loss,
            shard=self.vocab_shard,
            functions=self.chunk_functions,
        )

    def loss(self, logits: Tensor, batch: Batch) -> Loss:
        """Loss of logits [batch, seq, vocab]; of this rank's vocabulary shard under loss parallelism."""
        return self.with_metrics(self.loss_sum(logits, batch.labels, self.z_loss, self.vocab_shard))

    def with_metrics(self, found: LossSum) -> Loss:
        """Loss with the metrics that are reported."""
        z_loss = {} if found.z_loss is None else {"z_loss": found.z_loss}
        return Loss(found.objective, {"loss": found.cross_entropy, **z_loss})
