"""Expert parallelism: each rank of a group keeps other experts, and tokens are sent to them (Lepikhin et al. 2020).

Tensor-parallel ranks route other tokens each, also where experts are not split: so a router's gradient is partial.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from titan_exp.models.blocks.feed_forward import Experts, MoEFeedForward, compute_locally, weigh_rows
from titan_exp.models.blocks.linear import GroupedLinear
from titan_exp.ops.autograd import dense, local_tensor
from titan_exp.ops.moe.permutation import combine, permute, permute_weights, sort_by_expert
from titan_exp.ops.moe.routing import Routing
from titan_exp.parallel.collectives import all_gather, all_reduce, mark_partial
from titan_exp.parallel.expert_parallel.exchange import SymmetricExchange, TokenExchange, use_symmetric_memory
from titan_exp.parallel.mesh import Mesh
from titan_exp.parallel.tensor_parallel.layers import TensorParallelGroup


@dataclass(frozen=True)
class TokenGroup(TensorParallelGroup):
    """Tensor-parallel ranks, each with other tokens."""

    sequence: bool = True

    def gather(self, part: Tensor) -> Tensor:
        """All ranks' tokens [degree · tokens, ...]; the gradient is summed over ranks."""
        return self.gather_input(part[None])[0]

    def reduce(self, x: Float[Tensor, "all_tokens dim"]) -> Float[Tensor, "tokens dim"]:
        """Sum over ranks of all tokens, of which this rank keeps its own."""
        return self.reduce_output(x[None])[0]

    def split(self, x: Float[Tensor, "batch seq dim"]) -> Float[Tensor, "batch part dim"]:
        """This rank's part of tokens that all ranks have; the last ranks may have fewer, or none."""
        return _Split.apply(x, self)  # type: ignore[return-value]  # a Tensor

    def join(self, part: Float[Tensor, "batch part dim"], length: int) -> Float[Tensor, "batch seq dim"]:
        """The `length` tokens of each sequence from the ranks' parts, the same on all ranks, as is the gradient."""
        return _Join.apply(part, self, length)  # type: ignore[return-value]  # a Tensor

    def part(self, length: int) -> slice:
        """This rank's tokens of a sequence."""
        size = -(-length // self.degree)
        return slice(min(self.rank * size, length), min((self.rank + 1) * size, length))


def _joined(part: Tensor, region: TokenGroup, length: int) -> Tensor:
    padded = F.pad(part, (0, 0, 0, -(-length // region.degree) - part.shape[1]))
    return torch.cat(all_gather(padded, region.degree, region.group).chunk(region.degree), dim=1)[:, :length]


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: TokenGroup) -> Tensor:
        ctx.region, ctx.length = region, x.shape[1]
        return dense(x[:, region.part(x.shape[1])])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _joined(gradients[0], ctx.region, ctx.length), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, region: TokenGroup, length: int) -> Tensor:
        ctx.region = region
        return _joined(part, region, length)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # All ranks compute the same loss from all tokens, hence the same gradient.
        return gradients[0][:, ctx.region.part(gradients[0].shape[1])].contiguous(), None, None


@dataclass(frozen=True)
class ExpertParallelDispatch:
    """Replaces the local dispatch of `MoEFeedForward`."""

    group: str
    """Name of the process group of ranks with other experts."""
    degree: int
    """Number of these ranks."""
    channels: TokenGroup | None
    """Ranks with other channels of the same experts, which need each other's tokens; None for one."""
    symmetric_memory: bool = False
    """True if ranks read each other's rows through symmetric memory, instead of an all-to-all."""

    def __call__(
        self, tokens: Float[Tensor, "tokens dim"], routing: Routing, experts: Experts
    ) -> Callable[[], Float[Tensor, "tokens dim"]]:
        """Start to exchange counts; the result computes the weighted sum of the experts' outputs for these tokens."""
        chosen = routing.experts if self.channels is None else self.channels.gather(routing.experts)
        if self.degree == 1:
            return lambda: self._over_channels(tokens, Routing(chosen, routing.weights), experts, compute_locally)
        order, inverse, ends = sort_by_expert(chosen, experts.count)
        exchange = (
            SymmetricExchange.start(ends, chosen.shape[0], chosen.shape[1], self.degree, self.group)
            if self.symmetric_memory
            else TokenExchange.start(ends, self.degree, self.group)
        )

        def on_ranks(tokens: Tensor, routing: Routing, experts: Experts) -> Tensor:
            # As on one rank; what a recipe rounds must not depend on the weights there either.
            by_row = permute_weights(routing.weights, order, inverse)
            if experts.weighted_inputs:
                weighed = weigh_rows(permute(tokens, order, inverse), by_row)
                return combine(_on_ranks(exchange(), weighed, None, experts), order, inverse, None)
            by_row = None if experts.is_quantized else by_row
            rows = _on_ranks(exchange(), permute(tokens, order, inverse), by_row, experts)
            return combine(rows, order, inverse, routing.weights if by_row is None else None)

        return lambda: self._over_channels(tokens, Routing(chosen, routing.weights), experts, on_ranks)

    def _over_channels(
        self, tokens: Tensor, routing: Routing, experts: Experts, compute: Callable[[Tensor, Routing, Experts], Tensor]
    ) -> Tensor:
        """Outputs for this rank's tokens from experts whose channels other ranks have, too; `routing` has its weights,
        but the choice of all."""
        if self.channels is None:
            return compute(tokens, routing, experts)
        gathered = Routing(routing.experts, self.channels.gather(routing.weights))
        return self.channels.reduce(compute(self.channels.gather(tokens), gathered, experts))


def _on_ranks(
    exchange: TokenExchange | SymmetricExchange, rows: Tensor, weights: Tensor | None, experts: Experts
) -> Tensor:
    """Outputs of the experts on other ranks, weighted if weights are given."""
    received = exchange.dispatch(rows, weights)
    return exchange.give_back(experts(received.rows, received.ends, received.weights), received, rows.shape[0])


def apply_expert_parallel(
    model: nn.Module, mesh: Mesh, *, sequence_parallel: bool, symmetric_memory: bool = False
) -> None:
    """Shard experts and replace the dispatch of tokens, in place; parameter names stay.

    Does nothing if experts are sharded over the same ranks as other weights.
    """
    axes = mesh.experts
    if axes is None:
        return
    tp = mesh.sharding["tp"]
    tokens = TokenGroup(tp.get_group().group_name, tp.size(), tp.get_local_rank()) if tp.size() > 1 else None
    ep = axes["ep"]
    if symmetric_memory:
        use_symmetric_memory()
    for module in mixtures(model):
        module.dispatch = ExpertParallelDispatch(
            ep.get_group().group_name,
            ep.size(),
            tokens if axes["etp"].size() > 1 else None,
            symmetric_memory,
        )
        for linear, dim in ((module.experts.gate_up, 1), (module.experts.down, 2)):
            _shard(linear, axes, channels=dim)
            if axes["etp"].size() > 1:
                amax_reduce = partial(all_reduce, operation="max", group=axes["etp"].get_group().group_name)
                linear.linear_impl.shard(input_sharded=dim == 2, amax_reduce=amax_reduce)
        if tokens is not None:
            mark_partial(module.router)
            module.token_split = None if sequence_parallel else tokens


def mixtures(model: nn.Module) -> list[MoEFeedForward]:
    """Mixtures of experts of a model or pipeline stage, in order."""
    return [module for module in model.modules() if isinstance(module, MoEFeedForward)]


def _shard(linear: GroupedLinear, axes: DeviceMesh, *, channels: int) -> None:
    """Shard weights [experts, out, in] over ep by experts, and over etp by the dim of the channels.

    Biases [experts, out] are sharded by outputs over etp: ranks whose outputs are summed each add other ones, once.
    """
    linear.weight = _divided(linear.weight, axes, dim=channels)
    if linear.bias is not None:
        linear.bias = _divided(linear.bias, axes, dim=1)
        if channels == 2:
            local = local_tensor(linear.bias.detach())
            linear.bias_start = axes["etp"].get_local_rank() * local.shape[1]


def _divided(parameter: nn.Parameter, axes: DeviceMesh, dim: int) -> nn.Parameter:
    """This rank's shard of a parameter of experts, over etp by `dim`."""
    placements = {name: shard for name, shard in (("ep", Shard(0)), ("etp", Shard(dim))) if axes[name].size() > 1}
    if not placements:
        return parameter
    # src_data_rank=None: each rank slices its own copy, without communication.
    shards = list(placements.values())
    sharded = distribute_tensor(parameter.detach(), axes[tuple(placements)], shards, src_data_rank=None)
    return nn.Parameter(sharded, parameter.requires_grad)
