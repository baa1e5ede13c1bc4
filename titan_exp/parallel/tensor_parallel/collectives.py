"""Tensor-parallel collectives (f and g of Megatron): gather or copy a block's input, reduce its output.

Outside a block a token's hidden state is whole on every rank, or, with sequence parallelism, on the one rank that holds
the token (Korthikanti et al. 2022). Each direction's gradient is the other direction's collective.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_exp.ops.autograd import dense, in_type
from titan_exp.parallel.functional_collectives import all_gather, all_reduce, reduce_scatter


@dataclass(frozen=True)
class TensorParallelGroup:
    """Tensor-parallel ranks of this rank."""

    group: str
    """Name of their process group."""
    degree: int
    """Number of ranks."""
    rank: int
    """Index of this rank."""
    sequence: bool
    """True with sequence parallelism: outside blocks each rank holds a part of the tokens."""
    by_sequence: bool = True
    """True if that is a part of each sequence, False if consecutive tokens of all sequences, which are gathered and
    scattered without copies."""
    float8_as_bytes: bool = False
    """True if float8 is sent as bytes, as gloo needs. NCCL takes float8, whose gather the compiler can fuse."""

    def gather_input(self, x: Tensor) -> Tensor:
        """All tokens [batch, seq, dim]; the gradient is summed over ranks."""
        return _AllGatherSeq.apply(x, self) if self.sequence else _CopyToTP.apply(x, self)  # type: ignore[return-value]  # a Tensor

    def reduce_output(self, x: Tensor) -> Tensor:
        """Sum over ranks of [batch, seq, dim], of which a rank keeps its tokens with sequence parallelism."""
        return _ReduceScatterSeq.apply(x, self) if self.sequence else _ReduceFromTP.apply(x, self)  # type: ignore[return-value]  # a Tensor

    def gather_outputs(self, part: Tensor, outputs: int) -> Tensor:
        """All outputs [batch, seq, outputs] from the ranks' shards; the last shard may be smaller.

        All ranks compute the same from them, so that the gradient of a shard is that of this rank.
        """
        return _GatherOutputs.apply(part, self, outputs)  # type: ignore[return-value]  # a Tensor

    def share_vector(self, x: Tensor) -> Tensor:
        """A vector per sequence, which ranks use in part; with sequence parallelism the gradient stays partial."""
        return x if self.sequence else _CopyToTP.apply(x, self)  # type: ignore[return-value]  # a Tensor

    def gather_vector(self, part: Tensor) -> Tensor:
        """All outputs from equal shards of the ranks. With sequence parallelism ranks use them for their own tokens,
        and gradients are summed."""
        return _GatherVector.apply(part, self)  # type: ignore[return-value]  # a Tensor

    def split_inputs(self, x: Tensor) -> Tensor:
        """This rank's part of whole features [batch, seq, features]; the gradient is gathered."""
        return _SplitInputs.apply(x, self)  # type: ignore[return-value]  # a Tensor

    def rms_norm(self, part: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the features of all ranks, of which `part` [..., features] and `weight` [features] are this
        rank's, computed in fp32. Ranks may share features, if all have as many and every feature as many ranks."""
        return _RMSNorm.apply(part, weight, eps, self)  # type: ignore[return-value]  # a Tensor

    def gather_result(self, x: Tensor) -> Tensor:
        """All tokens [batch, seq, width]. All ranks compute the same from them: the gradient is that of this rank's."""
        return _GatherResult.apply(x, self)  # type: ignore[return-value]  # a Tensor

    def gather_tokens(self, x: Tensor) -> Tensor:
        """All tokens [batch, seq, width] of the ranks', without a gradient."""
        if x.dtype.itemsize == 1 and self.float8_as_bytes:
            return _gather_tokens(x.view(torch.uint8), self).view(x.dtype)
        return _gather_tokens(x, self)

    def scatter_tokens(self, x: Tensor) -> Tensor:
        """This rank's tokens of the sum over ranks of [batch, seq, width], without a gradient."""
        return _scatter_tokens(x, self)


def _gather_tokens(x: Tensor, region: TensorParallelGroup) -> Tensor:
    if x.shape[0] == 1 or not region.by_sequence:
        return _unflattened(all_gather(x.flatten(0, 1), region.degree, region.group), x)
    parts = all_gather(x, region.degree, region.group).chunk(region.degree)
    if x.dtype.itemsize == 1:
        return torch.cat([part.view(torch.uint8) for part in parts], dim=1).view(x.dtype)
    return torch.cat(parts, dim=1)


def _scatter_tokens(x: Tensor, region: TensorParallelGroup) -> Tensor:
    if x.shape[0] == 1 or not region.by_sequence:
        return _unflattened(reduce_scatter(x.flatten(0, 1), region.degree, region.group), x)
    return reduce_scatter(torch.cat(x.chunk(region.degree, dim=1)), region.degree, region.group)


def _unflattened(tokens: Tensor, x: Tensor) -> Tensor:
    """Tokens by row of the batch. No view, which FSDP2 warns about where it is the output of one of its units."""
    return torch.ops.aten._unsafe_view(tokens, (x.shape[0], -1, *x.shape[2:]))


class _AllGatherSeq(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: TensorParallelGroup) -> Tensor:
        ctx.region = region
        return _gather_tokens(x, region)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _scatter_tokens(gradients[0], ctx.region), None


class _ReduceScatterSeq(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: TensorParallelGroup) -> Tensor:
        ctx.region = region
        return _scatter_tokens(x, region)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _gather_tokens(gradients[0], ctx.region), None


class _CopyToTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: TensorParallelGroup) -> Tensor:
        ctx.region = region
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return all_reduce(gradients[0], "sum", ctx.region.group), None


class _ReduceFromTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: TensorParallelGroup) -> Tensor:
        return all_reduce(x, "sum", region.group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


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


class _GatherResult(_AllGatherSeq):
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].chunk(ctx.region.degree, dim=1)[ctx.region.rank].contiguous(), None


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
    return all_reduce(x.mean(-1, keepdim=True), "sum", region.group) / region.degree


class _SplitInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: TensorParallelGroup) -> Tensor:
        ctx.region = region
        return dense(x.chunk(region.degree, dim=-1)[region.rank])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gathered = all_gather(gradients[0].contiguous(), ctx.region.degree, ctx.region.group)
        return torch.cat(gathered.chunk(ctx.region.degree), dim=-1), None
