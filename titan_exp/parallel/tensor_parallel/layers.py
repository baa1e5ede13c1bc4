"""Sharded layers that replace a block's linears and embeddings; each rank holds a shard of the weight.

Weights are DTensors over the tensor-parallel axis, so that checkpoints and sharding know what they are part of; they
are computed with as the plain tensors that a rank holds.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_exp.models.blocks.linear_impl import LinearImpl
from titan_exp.models.blocks.transformer import LogitsLoss
from titan_exp.ops.local_tensor import local_tensor
from titan_exp.ops.loss.cross_entropy import LossSum
from titan_exp.parallel.tensor_parallel.collectives import TensorParallelGroup


class ColumnParallelLinear(nn.Module):
    """A projection from whole tokens to this rank's outputs.

    Args:
        weight: its rows divided among ranks; or whole, where `rows` chooses this rank's.
        region: the ranks.
        product: how it multiplies.
        rows: slices of the weight's rows, which other ranks may use as well.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        region: TensorParallelGroup,
        linear_impl: LinearImpl,
        rows: tuple[slice, ...] | None = None,
    ) -> None:
        super().__init__()
        self.weight, self.region, self.linear_impl, self.rows = weight, region, linear_impl, rows

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq of this rank, dim] to [batch, seq, outputs of this rank]."""
        weight = local_tensor(self.weight)
        if self.rows is not None:
            weight = torch.cat([weight[rows] for rows in self.rows])
        return self.linear_impl(self.region.gather_input(x), weight)


class RowParallelLinear(nn.Module):
    """A projection from this rank's inputs to whole tokens.

    Args:
        weight: its columns divided among ranks.
        region: the ranks.
        product: how it multiplies.
    """

    def __init__(self, weight: nn.Parameter, region: TensorParallelGroup, linear_impl: LinearImpl) -> None:
        super().__init__()
        self.weight, self.region, self.linear_impl = weight, region, linear_impl

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, inputs of this rank] to [batch, seq of this rank, dim]."""
        return self.region.reduce_output(self.linear_impl(x, local_tensor(self.weight)))


class VocabParallelEmbedding(nn.Module):
    """A table of which this rank holds the rows of some words.

    Args:
        weight: its rows divided among ranks.
        region: the ranks.
        first: the first word that is here.
    """

    parameter_role = "embedding"

    def __init__(self, weight: nn.Parameter, region: TensorParallelGroup, first: int) -> None:
        super().__init__()
        self.weight, self.region, self.first = weight, region, first

    def forward(self, tokens: Tensor) -> Tensor:
        """Rows of `tokens` [batch, seq], as [batch, seq of this rank, dim]."""
        weight = local_tensor(self.weight)
        row = tokens - self.first
        here = (row >= 0) & (row < weight.shape[0])
        found = F.embedding(row.where(here, 0), weight) * here[..., None]
        return self.region.reduce_output(found)


class VocabParallelHead(nn.Module):
    """A head of which this rank holds the rows of some words.

    Args:
        weight: its rows divided among ranks; None where it is tied to the embedding's.
        region: the ranks.
        vocabulary: words of all ranks where each needs all logits; None where this rank's logits are left apart.
    """

    parameter_role = "head"

    def __init__(self, weight: nn.Parameter | None, region: TensorParallelGroup, vocabulary: int | None) -> None:
        super().__init__()
        self.weight, self.region, self.vocabulary = weight, region, vocabulary

    def forward(self, x: Tensor, tied: Tensor | None = None, loss: LogitsLoss | None = None) -> Tensor | LossSum:
        """Logits [batch, seq, words], or what `loss` makes of all tokens' hidden states and this rank's weight."""
        weight = self.weight if tied is None else tied
        assert weight is not None, "a tied head is handed the embedding's weight"
        x, weight = self.region.gather_input(x), local_tensor(weight)
        if loss is not None:
            return loss(x, weight)
        logits = F.linear(x, weight)
        return logits if self.vocabulary is None else self.region.whole_logits(logits, self.vocabulary)
