"""Sharded layers that replace a block's linears, embedding and head. Weights are DTensors over the tp axis, so that
checkpoints and FSDP know the whole shape; the computation uses their local tensors."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_exp.models.blocks.linear import LinearImpl, add_bias
from titan_exp.models.blocks.transformer import LogitsLoss
from titan_exp.ops.autograd import dense, embedding_rows, in_type, local_tensor
from titan_exp.ops.cross_entropy import LossSum
from titan_exp.parallel.mesh import all_gather, all_reduce, reduce_scatter


@dataclass(frozen=True)
class TensorParallelGroup:
    """Group of tensor-parallel ranks, as one of them sees it."""

    group: str
    degree: int
    rank: int
    sequence: bool  # True with sequence parallelism: outside blocks each rank holds a part of the tokens
    by_sequence: bool = True
    """True if a rank has a part of each sequence; else consecutive tokens of all, exchanged without copies."""
    float8_as_bytes: bool = False
    """True if float8 is sent as bytes, as gloo needs. NCCL takes float8, whose gather the compiler can fuse."""

    def gather_input(self, x: Tensor) -> Tensor:
        """Gather all tokens [batch, seq, dim]; the gradient is summed over ranks."""
        return _dual(self, x, "gather_tokens", "scatter_tokens") if self.sequence else _dual(self, x, "pass_on", "sum")

    def reduce_output(self, x: Tensor) -> Tensor:
        """Sum [batch, seq, dim] over ranks; with sequence parallelism a rank keeps only its tokens."""
        return _dual(self, x, "scatter_tokens", "gather_tokens") if self.sequence else _dual(self, x, "sum", "pass_on")

    def gather_outputs(self, part: Tensor, outputs: int) -> Tensor:
        """Gather all outputs [batch, seq, outputs] from the ranks' shards; the last shard may be smaller. All ranks
        compute the same from them, so the gradient of a shard is taken from this rank alone."""
        return _GatherOutputs.apply(part, self, outputs)  # type: ignore[return-value]  # a Tensor

    def share_vector(self, x: Tensor) -> Tensor:
        """Pass on a vector per sequence; with sequence parallelism its gradient stays partial."""
        return x if self.sequence else _dual(self, x, "pass_on", "sum")

    def gather_vector(self, part: Tensor) -> Tensor:
        """Gather all outputs from the ranks' equal shards; with sequence parallelism, gradients are summed."""
        return _GatherVector.apply(part, self)  # type: ignore[return-value]  # a Tensor

    def split_inputs(self, x: Tensor) -> Tensor:
        """Take this rank's part of whole features [batch, seq, features]; the gradient is gathered."""
        return _SplitInputs.apply(x, self)  # type: ignore[return-value]  # a Tensor

    def rms_norm(self, part: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute RMSNorm in fp32 over the features of all ranks; `part` [..., features] and `weight` [features] belong
        to this rank. Ranks may share features evenly."""
        return _RMSNorm.apply(part, weight, eps, self)  # type: ignore[return-value]  # a Tensor

    def gather_result(self, x: Tensor) -> Tensor:
        """Gather all tokens [batch, seq, width], from which all ranks compute the same; so each keeps its gradient."""
        return _dual(self, x, "gather_tokens", "own_part")

    def own_tokens(self, x: Tensor) -> Tensor:
        """Take this rank's tokens of [batch, seq, width]; no other rank has a gradient for them."""
        if x.shape[0] == 1 or not self.by_sequence:
            return x.flatten(0, 1).chunk(self.degree)[self.rank].unflatten(0, (x.shape[0], -1))
        return x.chunk(self.degree, dim=1)[self.rank]

    def gather_tokens(self, x: Tensor) -> Tensor:
        """Gather all tokens [batch, seq, width], without a gradient."""
        if x.dtype.itemsize == 1 and x.is_floating_point() and self.float8_as_bytes:
            return self.gather_tokens(x.view(torch.uint8)).view(x.dtype)
        if x.shape[0] == 1 or not self.by_sequence:
            return _unflattened(all_gather(x.flatten(0, 1), self.degree, self.group), x)
        parts = all_gather(x, self.degree, self.group).chunk(self.degree)
        if x.dtype.itemsize == 1:
            return torch.cat([part.view(torch.uint8) for part in parts], dim=1).view(x.dtype)
        return torch.cat(parts, dim=1)

    def scatter_tokens(self, x: Tensor) -> Tensor:
        """Sum [batch, seq, width] over ranks and take this rank's tokens, without a gradient."""
        if x.shape[0] == 1 or not self.by_sequence:
            return _unflattened(reduce_scatter(x.flatten(0, 1), self.degree, self.group), x)
        return reduce_scatter(torch.cat(x.chunk(self.degree, dim=1)), self.degree, self.group)

    def sum(self, x: Tensor) -> Tensor:
        """Sum over ranks, without a gradient."""
        return all_reduce(x, "sum", self.group)

    def pass_on(self, x: Tensor) -> Tensor:
        """Return the same tensor, without communication."""
        return x.view_as(x)

    def own_part(self, x: Tensor) -> Tensor:
        """Take this rank's part of each sequence of [batch, seq, width], without a gradient."""
        return x.chunk(self.degree, dim=1)[self.rank].contiguous()


def _unflattened(tokens: Tensor, x: Tensor) -> Tensor:
    """Split gathered tokens into rows of the batch. A copy: FSDP2 warns if the output of a unit is a view."""
    return torch.ops.aten._unsafe_view(tokens, (x.shape[0], -1, *x.shape[2:]))


def _dual(region: TensorParallelGroup, x: Tensor, operation: str, of_gradient: str) -> Tensor:
    return _Dual.apply(x, region, operation, of_gradient)  # type: ignore[return-value]  # a Tensor


class _Dual(torch.autograd.Function):
    """Operation of a group by name, and the one that maps the gradient of its result to that of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, region: TensorParallelGroup, operation: str, of_gradient: str) -> Tensor:
        ctx.region, ctx.of_gradient = region, of_gradient
        return getattr(region, operation)(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return getattr(ctx.region, ctx.of_gradient)(gradients[0]), None, None, None


class _GatherOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, region: TensorParallelGroup, outputs: int) -> Tensor:
        largest = -(-outputs // region.degree)
        ctx.mine = slice(region.rank * largest, region.rank * largest + part.shape[-1])
        padded = F.pad(part, (0, largest - part.shape[-1]))
        *parts, last = all_gather(padded, region.degree, region.group).chunk(region.degree)
        return torch.cat((*parts, last[..., : outputs - len(parts) * largest]), dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0][..., ctx.mine].contiguous(), None, None


class _GatherVector(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, region: TensorParallelGroup) -> Tensor:
        ctx.region = region
        return torch.cat(all_gather(part, region.degree, region.group).chunk(region.degree), dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        parts = gradients[0].chunk(ctx.region.degree, dim=-1)
        if not ctx.region.sequence:
            return parts[ctx.region.rank].contiguous(), None
        return reduce_scatter(torch.cat(parts), ctx.region.degree, ctx.region.group), None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, weight: Tensor, eps: float, region: TensorParallelGroup) -> Tensor:
        x = part.float()
        inverse = (_mean(x.square(), region) + eps).rsqrt()
        ctx.region = region
        ctx.save_for_backward(part, weight, inverse)
        return in_type(x * inverse * weight, part.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        part, weight, inverse = ctx.saved_tensors
        gradient, normalized = gradients[0].float(), part.float() * inverse
        weighted = gradient * weight
        of_part = inverse * (weighted - normalized * _mean(weighted * normalized, ctx.region))
        of_weight = (gradient * normalized).flatten(0, -2).sum(0)
        return in_type(of_part, part.dtype), in_type(of_weight, weight.dtype), None, None


def _mean(x: Tensor, region: TensorParallelGroup) -> Tensor:
    """Mean over the last dim of all ranks [..., 1]."""
    return region.sum(x.mean(-1, keepdim=True)) / region.degree


class _SplitInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: TensorParallelGroup) -> Tensor:
        ctx.region = region
        return dense(x.chunk(region.degree, dim=-1)[region.rank])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gathered = all_gather(gradients[0].contiguous(), ctx.region.degree, ctx.region.group)
        return torch.cat(gathered.chunk(ctx.region.degree), dim=-1), None


class ColumnParallelLinear(nn.Module):
    """Column-parallel linear layer: maps whole tokens to this rank's outputs. Weight and bias are sharded by rows, or
    whole with `rows` and `bias_rows`, this rank's slices. `whole_outputs` counts all ranks' outputs, if gathered."""

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
        """Map [batch, seq of this rank, dim] to [batch, seq, outputs of this rank]."""
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
    """Column-parallel linear layer for one vector per sequence; every rank gets all outputs, for its own tokens. The
    bias is sharded like the weight, or whole with the rows that this rank uses."""

    def __init__(
        self, weight: nn.Parameter, region: TensorParallelGroup, bias: nn.Parameter | None, bias_rows: slice | None
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.region, self.bias_rows = weight, bias, region, bias_rows

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, inputs] to [batch, outputs of all ranks]."""
        bias = None if self.bias is None else local_tensor(self.bias)
        if bias is not None and self.bias_rows is not None:
            bias = bias[self.bias_rows]
        part = F.linear(self.region.share_vector(x), local_tensor(self.weight))
        return self.region.gather_vector(add_bias(part, bias))


class RegionModule(nn.Module):
    """Module without parameters that exchanges tensors in a group."""

    def __init__(self, region: TensorParallelGroup) -> None:
        super().__init__()
        self.region = region


class GatheredTokens(RegionModule):
    """Gathers all tokens for modules that each read a part of them."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, seq of this rank, width] to [batch, seq, width]."""
        return self.region.gather_input(x)


class RowParallelLinear(nn.Module):
    """Row-parallel linear layer: maps this rank's inputs to whole tokens; the weight is sharded by columns. The bias is
    whole and added to the sum. With sequence parallelism its gradient is partial. `splits_input` says that the input is
    whole."""

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
        """Map [batch, seq, inputs of this rank] to [batch, seq of this rank, dim]."""
        x = self.region.split_inputs(x) if self.splits_input else x
        return add_bias(self.linear_impl.row_parallel(x, local_tensor(self.weight), self.region), self.bias)


class RMSNormAcrossRanks(nn.Module):
    """RMSNorm over the features of all ranks. The weight is sharded alike, or whole with this rank's `rows`."""

    def __init__(self, weight: nn.Parameter, region: TensorParallelGroup, eps: float, rows: slice | None) -> None:
        super().__init__()
        self.weight, self.region, self.eps, self.rows = weight, region, eps, rows

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., features of this rank]."""
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
        """Embed token ids [batch, seq] as [batch, seq of this rank, dim]; with a tied `head`, call that."""
        if head is not None:
            return head(x, self.weight, loss)
        row = x - self.first
        here = (row >= 0) & (row < local_tensor(self.weight.detach()).shape[0])
        found = embedding_rows(row.where(here, 0), self.weight, self.row_dtype) * here[..., None]
        return self.region.reduce_output(found)


class VocabParallelHead(nn.Module):
    """LM head with this rank's vocabulary rows, None if tied; `vocabulary` logits are gathered, None keeps shards."""

    parameter_role = "head"

    def __init__(self, weight: nn.Parameter | None, region: TensorParallelGroup, vocabulary: int | None) -> None:
        super().__init__()
        self.weight, self.region, self.vocabulary = weight, region, vocabulary

    def forward(
        self, x: Tensor, tied: Tensor | None = None, loss: LogitsLoss | None = None
    ) -> Tensor | LossSum | tuple[LossSum, ...]:
        """Return logits [batch, seq, vocab], or the `loss` of all tokens' hidden states under this rank's weight."""
        weight = self.weight if tied is None else tied
        assert weight is not None, "a tied head is handed the embedding's weight"
        x, weight = self.region.gather_input(x), local_tensor(weight)
        if loss is not None:
            return loss(x, weight)
        logits = F.linear(x, weight)
        return logits if self.vocabulary is None else self.region.gather_outputs(logits, self.vocabulary)
