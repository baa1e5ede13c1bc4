"""Sharded layers that replace a block's linears, embedding and head.

Weights are DTensors over the tp axis, so that checkpoints and FSDP know the whole shape; they are computed with as
local tensors.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_exp.models.blocks.linear import add_bias
from titan_exp.models.blocks.linear_impl import LinearImpl
from titan_exp.models.blocks.transformer import LogitsLoss
from titan_exp.ops.local_tensor import embedding_rows, local_tensor
from titan_exp.ops.loss.cross_entropy import LossSum
from titan_exp.parallel.tensor_parallel.collectives import TensorParallelGroup


class ColumnParallelLinear(nn.Module):
    """Column-parallel linear layer: whole tokens to this rank's outputs.

    Weight and bias are sharded by rows, or whole with `rows` and `bias_rows`, the slices that this rank uses. `gathers`
    is False if the input has been gathered. `whole_outputs` is the number of outputs of all ranks, if each gets them
    all.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        region: TensorParallelGroup,
        linear_impl: LinearImpl,
        rows: tuple[slice, ...] | None = None,
        *,
        bias: nn.Parameter | None = None,
        bias_rows: tuple[slice, ...] | None = None,
        gathers: bool = True,
        whole_outputs: int | None = None,
    ) -> None:
        super().__init__()
        self.weight, self.region, self.linear_impl, self.rows = weight, region, linear_impl, rows
        self.bias, self.bias_rows = bias, bias_rows
        self.gathers, self.whole_outputs = gathers, whole_outputs

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq of this rank, dim] to [batch, seq, outputs of this rank]."""
        weight, bias = local_tensor(self.weight), None if self.bias is None else local_tensor(self.bias)
        if self.rows is not None:
            weight = torch.cat([weight[rows] for rows in self.rows])
        if bias is not None and self.bias_rows is not None:
            bias = torch.cat([bias[rows] for rows in self.bias_rows])
        multiplied = (
            self.linear_impl.column_parallel(x, weight, self.region) if self.gathers else self.linear_impl(x, weight)
        )
        out = add_bias(multiplied, bias)
        return out if self.whole_outputs is None else self.region.gather_outputs(out, self.whole_outputs)


class VectorParallelLinear(nn.Module):
    """Column-parallel linear layer over a vector per sequence; every rank gets all outputs, for its own tokens.

    The bias is sharded like the weight, or whole with the rows that this rank uses.
    """

    def __init__(
        self, weight: nn.Parameter, region: TensorParallelGroup, bias: nn.Parameter | None, bias_rows: slice | None
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.region, self.bias_rows = weight, bias, region, bias_rows

    def forward(self, x: Tensor) -> Tensor:
        """[batch, inputs] to [batch, outputs of all ranks]."""
        bias = None if self.bias is None else local_tensor(self.bias)
        if bias is not None and self.bias_rows is not None:
            bias = bias[self.bias_rows]
        part = F.linear(self.region.share_vector(x), local_tensor(self.weight))
        return self.region.gather_vector(add_bias(part, bias))


class GatheredTokens(nn.Module):
    """All tokens from this rank's tokens, for readers that each use them in part."""

    def __init__(self, region: TensorParallelGroup) -> None:
        super().__init__()
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq of this rank, width] to [batch, seq, width]."""
        return self.region.gather_input(x)


class RowParallelLinear(nn.Module):
    """Row-parallel linear layer: this rank's inputs to whole tokens; the weight is sharded by columns.

    The bias is whole and added once, to the sum; with sequence parallelism to this rank's tokens only, so that its
    gradient is partial. `splits_input` says that the input is whole.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        region: TensorParallelGroup,
        linear_impl: LinearImpl,
        bias: nn.Parameter | None = None,
        *,
        splits_input: bool = False,
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.region, self.linear_impl = weight, bias, region, linear_impl
        self.splits_input = splits_input

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, inputs of this rank] to [batch, seq of this rank, dim]."""
        x = self.region.split_inputs(x) if self.splits_input else x
        return add_bias(self.linear_impl.row_parallel(x, local_tensor(self.weight), self.region), self.bias)


class RMSNormAcrossRanks(nn.Module):
    """RMSNorm over the features of all ranks.

    The weight is sharded like the features, or whole with the rows that this rank uses.
    """

    def __init__(self, weight: nn.Parameter, region: TensorParallelGroup, eps: float, rows: slice | None) -> None:
        super().__init__()
        self.weight, self.region, self.eps, self.rows = weight, region, eps, rows

    def forward(self, x: Tensor) -> Tensor:
        """[..., features of this rank] to the same."""
        weight = local_tensor(self.weight)
        return self.region.rms_norm(x, weight if self.rows is None else weight[self.rows], self.eps)


class VocabParallelEmbedding(nn.Module):
    """Embedding whose weight holds this rank's vocabulary rows, from `first` on."""

    parameter_role = "embedding"
    reads_weight_in_backward = False
    row_dtype: torch.dtype | None = None

    def __init__(self, weight: nn.Parameter, region: TensorParallelGroup, first: int) -> None:
        super().__init__()
        self.weight, self.region, self.first = weight, region, first

    def forward(
        self, x: Tensor, head: nn.Module | None = None, loss: LogitsLoss | None = None
    ) -> Tensor | LossSum | tuple[LossSum, ...]:
        """Embeddings of token ids [batch, seq], as [batch, seq of this rank, dim]; for hidden states, the tied head's
        result."""
        if head is not None:
            return head(x, self.weight, loss)
        row = x - self.first
        here = (row >= 0) & (row < local_tensor(self.weight.detach()).shape[0])
        found = embedding_rows(row.where(here, 0), self.weight, self.row_dtype) * here[..., None]
        return self.region.reduce_output(found)


class VocabParallelHead(nn.Module):
    """LM head whose weight holds this rank's vocabulary rows; None if tied to the embedding.

    `vocabulary` is the number of gathered logits; None keeps them sharded for loss parallelism.
    """

    parameter_role = "head"

    def __init__(self, weight: nn.Parameter | None, region: TensorParallelGroup, vocabulary: int | None) -> None:
        super().__init__()
        self.weight, self.region, self.vocabulary = weight, region, vocabulary

    def forward(
        self, x: Tensor, tied: Tensor | None = None, loss: LogitsLoss | None = None
    ) -> Tensor | LossSum | tuple[LossSum, ...]:
        """Logits [batch, seq, vocab], or `loss` of all tokens' hidden states and this rank's weight."""
        weight = self.weight if tied is None else tied
        assert weight is not None, "a tied head is handed the embedding's weight"
        x, weight = self.region.gather_input(x), local_tensor(weight)
        if loss is not None:
            return loss(x, weight)
        logits = F.linear(x, weight)
        return logits if self.vocabulary is None else self.region.gather_outputs(logits, self.vocabulary)
