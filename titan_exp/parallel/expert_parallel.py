"""Expert parallelism: places experts on ranks and exchanges tokens between them."""

import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import Shard, distribute_tensor

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.models.blocks.feed_forward import Experts, Mixture, MoEFeedForward, compute_locally, weigh_rows
from titan_exp.models.blocks.linear import GroupedLinear
from titan_exp.ops.autograd import dense, keep_unsaved, local_tensor, unsaved_tensors
from titan_exp.ops.moe.permutation import combine, experts_of_rows, permute, permute_weights, sort_by_expert
from titan_exp.ops.moe.routing import Routing
from titan_exp.parallel.mesh import (
    Mesh,
    all_gather,
    all_reduce,
    all_to_all_rows,
    finish_count_exchange,
    group_named,
    mark_partial,
    return_rows,
    start_count_exchange,
)
from titan_exp.parallel.symmetric_room import worst_case
from titan_exp.parallel.tensor_parallel.layers import TensorParallelGroup


@dataclass(frozen=True)
class Received:
    """Rows that a rank received for its experts."""

    rows: Float[Tensor, "received dim"]  # rows, sorted by expert, source rank and token
    weights: Float[Tensor, " received"] | None
    ends: Int32[Tensor, " local"]  # end of the rows of each of this rank's experts
    order: Any  # order or placement of the rows; the exchange needs it to send them back


@dataclass(frozen=True)
class TokenExchange:
    """All-to-all exchange of one layer's rows among expert-parallel ranks, which have equally many experts."""

    sent: Int64[Tensor, " ranks"]  # rows that this rank sends to each rank, on the CPU
    received: Int64[Tensor, " ranks"]  # rows that it receives from each rank, on the CPU
    counts: Int64[Tensor, "ranks local"]  # rows received from each rank for each of this rank's experts
    group: str

    @staticmethod
    def start(ends: Int32[Tensor, " experts"], ranks: int, group: str) -> "Callable[[], TokenExchange]":
        """Start to exchange counts of rows with these ends per expert. The result waits for them on the host."""
        counts = ends.diff(prepend=ends.new_zeros(1)).long().view(ranks, -1)
        started = start_count_exchange(counts, group)

        def finish() -> TokenExchange:
            received, rows = finish_count_exchange(*started)
            return TokenExchange(rows[0], rows[1], received, group)

        return finish

    def dispatch(self, rows: Float[Tensor, "rows dim"], weights: Float[Tensor, " rows"] | None) -> Received:
        """Send each row, with its weight, to the rank of its expert; return the rows for this rank's experts."""
        found = all_to_all_rows(rows, self.sent, self.received, None, self.group)
        order = RowOrder.by_expert(self.counts, found.shape[0])
        if weights is not None:
            weights = order.apply(all_to_all_rows(weights, self.sent, self.received, found.shape[0], self.group))
        return Received(order.apply(found), weights, self.counts.sum(0).cumsum(0, dtype=torch.int32), order)

    def give_back(
        self, rows: Float[Tensor, "received dim"], received: Received, size: int
    ) -> Float[Tensor, "rows dim"]:
        """Send rows back to the ranks of their tokens; return this rank's `size` rows in the order of dispatch."""
        # Weighted rows are summed as they are, so backward needs none of them.
        send = all_to_all_rows if received.weights is None else return_rows
        return send(received.order.undo(rows), self.received, self.sent, size, self.group)


@dataclass(frozen=True)
class RowOrder:
    """Permutation of rows and its inverse."""

    source: Int64[Tensor, " rows"]
    target: Int64[Tensor, " rows"]

    @staticmethod
    def by_expert(counts: Int64[Tensor, "ranks local"], size: int) -> "RowOrder":
        """Order by expert, then rank, of `size` rows sorted by rank, then expert."""
        by_rank, by_expert = counts.flatten(), counts.t().flatten()
        starts_by_rank = (by_rank.cumsum(0) - by_rank).view_as(counts)
        starts_by_expert = (by_expert.cumsum(0) - by_expert).view_as(counts.t()).t()
        shift = starts_by_rank - starts_by_expert
        rows = torch.arange(size, device=counts.device)
        # Without a size, repeat_interleave synchronizes.
        source = rows + shift.t().flatten().repeat_interleave(by_expert, output_size=size)
        target = rows - shift.flatten().repeat_interleave(by_rank, output_size=size)
        return RowOrder(source, target)

    def apply(self, rows: Tensor) -> Tensor:
        """Rows in this order."""
        return _Reorder.apply(rows, self.source, self.target)  # type: ignore[return-value]  # a Tensor

    def undo(self, rows: Tensor) -> Tensor:
        """Rows back in their original order."""
        return _Reorder.apply(rows, self.target, self.source)  # type: ignore[return-value]  # a Tensor


class _Reorder(torch.autograd.Function):
    """Permutation whose gradient is a gather as well, since scattering would add."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(target)
        return rows.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (target,) = ctx.saved_tensors
        return gradients[0].index_select(0, target), None, None


def use_symmetric_memory() -> None:
    """Have torch allocate symmetric memory through NVSHMEM, before any is. Raises UserError without NVSHMEM."""
    from torch.distributed import _symmetric_memory as memory

    if not (hasattr(torch.ops.symm_mem, "all_to_all_vdev_2d_offset") and memory.is_nvshmem_available()):
        reason = "it needs NVSHMEM, which this build of torch does not find here"
        remedy = "use parallelism.token_exchange=all_to_all, or pip install nvidia-nvshmem-cu12 (cu13 for CUDA 13)"
        violation = Violation("parallelism.token_exchange", "symmetric_memory", reason, remedy)
        raise UserError("This machine cannot exchange tokens through symmetric memory.", [violation])
    memory.set_backend("NVSHMEM")


@dataclass(frozen=True)
class SymmetricExchange:
    """Symmetric-memory exchange of one layer's rows among expert-parallel ranks, which have equally many experts."""

    splits: Int64[Tensor, " experts"]  # rows that this rank sends to each expert
    room: int  # number of rows that the results have room for
    ranks: int
    group: str

    @staticmethod
    def start(
        ends: Int32[Tensor, " experts"], tokens: int, choices: int, ranks: int, group: str
    ) -> "Callable[[], SymmetricExchange]":
        """Prepare the exchange of `tokens` tokens' rows, with these ends per expert. The result waits for nothing."""
        splits, room = (
            ends.diff(prepend=ends.new_zeros(1)).long(),
            worst_case(tokens, choices, len(ends) // ranks, ranks),
        )
        return lambda: SymmetricExchange(splits, room, ranks, group)

    def dispatch(self, rows: Float[Tensor, "rows dim"], weights: Float[Tensor, " rows"] | None) -> Received:
        """Send each row, with its weight, to the rank of its expert; rows beyond those received are zeros."""
        found, placement = symmetric_dispatch(rows, self.splits, self.room, self.group)
        if weights is not None:
            weights = symmetric_dispatch(weights[:, None], self.splits, self.room, self.group)[0][:, 0]
        return Received(found, weights, expert_ends(placement, self.ranks), placement)

    def give_back(
        self, rows: Float[Tensor, "received dim"], received: Received, size: int
    ) -> Float[Tensor, "rows dim"]:
        """Send rows back to the ranks of their tokens; return this rank's `size` rows in the order of dispatch."""
        return symmetric_return(rows, received.order, self.splits, size, self.group)


def expert_ends(placement: Int64[Tensor, "2 pieces"], ranks: int) -> Int32[Tensor, " local"]:
    """End of each local expert's rows; the free rows before the next expert's rows are included. `placement` has the
    numbers and first rows of the pieces received for each local expert from each rank."""
    sizes, starts = placement.view(2, -1, ranks).unbind()
    return torch.cat([starts[1:, 0], (starts[-1, 0] + sizes[-1].sum())[None]]).int()


@torch.library.custom_op("titan_exp::symmetric_dispatch", mutates_args=())
def symmetric_dispatch(rows: Tensor, splits: Tensor, room: int, group: str) -> tuple[Tensor, Tensor]:
    """Send rows sorted by expert, `splits[e]` of them to expert e. Returns rows, zeros up to `room`, and placement."""
    ranks = group_named(group).size()
    sent, counts, found, placement = _BUFFERS.of("dispatch", rows, room, (splits.shape[0],), group)
    sent.copy_(rows)
    counts.copy_(splits)
    torch.ops.symm_mem.all_to_all_vdev_2d(sent, found, counts, placement, group)
    placement = placement.clone()
    sizes, starts = placement.view(2, -1, ranks).unbind()
    expert = experts_of_rows(expert_ends(placement, ranks), room).clamp(max=sizes.shape[0] - 1)
    filled = torch.arange(room, device=rows.device) < (starts[:, 0] + sizes.sum(1))[expert]
    return found.masked_fill(~filled[:, None], 0), placement


@symmetric_dispatch.register_fake
def _(rows: Tensor, splits: Tensor, room: int, group: str) -> tuple[Tensor, Tensor]:
    return rows.new_empty(room, rows.shape[1]), splits.new_empty(2, splits.shape[0])


@torch.library.custom_op("titan_exp::symmetric_return", mutates_args=())
def symmetric_return(rows: Tensor, placement: Tensor, splits: Tensor, size: int, group: str) -> Tensor:
    """Send rows of this placement back to the ranks that sent them, in the order in which they were sent."""
    sent, counts, found, back = _BUFFERS.of("return", rows, size, tuple(placement.shape), group)
    sent.copy_(rows)
    counts.copy_(placement)
    torch.ops.symm_mem.all_to_all_vdev_2d_offset(sent, found, counts, back, group)
    return found.clone()


@symmetric_return.register_fake
def _(rows: Tensor, placement: Tensor, splits: Tensor, size: int, group: str) -> Tensor:
    return rows.new_empty(size, rows.shape[1])


def _save_dispatch(ctx: Any, inputs: tuple[Tensor, Tensor, int, str], output: tuple[Tensor, Tensor]) -> None:
    rows, splits, _, ctx.group = inputs
    ctx.size = rows.shape[0]
    ctx.save_for_backward(output[1], splits)


def _dispatch_gradient(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None, None, None]:
    placement, splits = ctx.saved_tensors
    return symmetric_return(gradient.contiguous(), placement, splits, ctx.size, ctx.group), None, None, None


def _save_return(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int, str], output: Tensor) -> None:
    rows, _, splits, _, ctx.group = inputs
    ctx.room = rows.shape[0]
    keep_unsaved(ctx, splits)


def _return_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
    (splits,) = unsaved_tensors(ctx)
    rows, _ = symmetric_dispatch(gradient.contiguous(), splits, ctx.room, ctx.group)
    return rows, None, None, None, None


symmetric_dispatch.register_autograd(_dispatch_gradient, setup_context=_save_dispatch)
symmetric_return.register_autograd(_return_gradient, setup_context=_save_return)


class _SymmetricBuffers:
    """Symmetric memory of the operators, two sets for each kind of message, used in turn. An operator reads other
    ranks' rows after a barrier and has no barrier at its end, so others may still read while a rank goes on. The next
    operator's barrier ends that, so a set is free again one operator later."""

    def __init__(self) -> None:
        self._sets: dict[Any, list[tuple[Tensor, ...]]] = {}
        self._turns: defaultdict[Any, int] = defaultdict(int)

    def of(self, kind: str, rows: Tensor, size: int, counts: tuple[int, ...], group: str) -> tuple[Tensor, ...]:
        """Buffers for rows and counts to send, for `size` rows to receive, and for their placement."""
        assert not isinstance(rows, FakeTensor), "the planner leaves out the body of the operators"
        key = (kind, tuple(rows.shape), rows.dtype, rows.device, size, counts, group)
        if key not in self._sets:
            shapes = ((rows.shape, rows.dtype), (counts, torch.int64), ((size, rows.shape[1]), rows.dtype))
            shapes = (*shapes, ((2, counts[-1]), torch.int64))
            self._sets[key] = [tuple(allocate(*shape, rows.device, group) for shape in shapes) for _ in range(2)]
            size = 2 * sum(buffer.nbytes for buffer in self._sets[key][0])
            text = "token exchange allocates %.3g GiB more of symmetric memory"
            logging.getLogger("titan_exp").info(text, size / 2**30)
        self._turns[key] += 1
        return self._sets[key][self._turns[key] % 2]


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, group: str) -> Tensor:
    """Allocate symmetric memory; all ranks of the group must call it together."""
    from torch.distributed import _symmetric_memory as memory

    buffer = memory.empty(shape, dtype=dtype, device=device)
    memory.rendezvous(buffer, group_named(group))
    return buffer


_BUFFERS = _SymmetricBuffers()


@dataclass(frozen=True)
class TokenGroup(TensorParallelGroup):
    """Tensor-parallel ranks that hold different tokens."""

    sequence: bool = True

    def gather(self, part: Tensor) -> Tensor:
        """Gather all ranks' tokens [degree · tokens, ...]; the gradient is summed over ranks."""
        return self.gather_input(part[None])[0]

    def reduce(self, x: Float[Tensor, "all_tokens dim"]) -> Float[Tensor, "tokens dim"]:
        """Sum all tokens over ranks; this rank keeps its own tokens."""
        return self.reduce_output(x[None])[0]

    def split(self, x: Float[Tensor, "batch seq dim"]) -> Float[Tensor, "batch part dim"]:
        """Take this rank's part of tokens that all ranks have; the last ranks may get fewer, or none."""
        return _Split.apply(x, self)  # type: ignore[return-value]  # a Tensor

    def join(self, part: Float[Tensor, "batch part dim"], length: int) -> Float[Tensor, "batch seq dim"]:
        """Gather the `length` tokens of each sequence; result and gradient are the same on all ranks."""
        return _Join.apply(part, self, length)  # type: ignore[return-value]  # a Tensor

    def part(self, length: int) -> slice:
        """Slice of this rank's tokens in a sequence."""
        size = -(-length // self.degree)
        return slice(min(self.rank * size, length), min((self.rank + 1) * size, length))


def _joined(part: Tensor, region: TokenGroup, length: int) -> Tensor:
    padded = nn.functional.pad(part, (0, 0, 0, -(-length // region.degree) - part.shape[1]))
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
    """Expert-parallel dispatch: replaces the local dispatch of `MoEFeedForward`."""

    group: str  # name of the process group of ranks that hold different experts
    degree: int
    channels: TokenGroup | None
    """Ranks that hold different channels of the same experts and need each other's tokens; None if there is one."""
    symmetric_memory: bool = False
    """True if ranks read each other's rows through symmetric memory, instead of an all-to-all."""

    def __call__(
        self, tokens: Float[Tensor, "tokens dim"], routing: Routing, experts: Experts
    ) -> Callable[[], Float[Tensor, "tokens dim"]]:
        """Start to exchange counts; the result computes the weighted sum of the experts' outputs for these tokens."""
        chosen = routing.experts if self.channels is None else self.channels.gather(routing.experts)
        known = routing.order if self.channels is None else None
        if self.degree == 1:
            return lambda: self._over_channels(
                tokens, Routing(chosen, routing.weights, known), experts, compute_locally
            )
        order, inverse, ends = known or sort_by_expert(chosen, experts.count)
        exchange = (
            SymmetricExchange.start(ends, chosen.shape[0], chosen.shape[1], self.degree, self.group)
            if self.symmetric_memory
            else TokenExchange.start(ends, self.degree, self.group)
        )

        def on_ranks(tokens: Tensor, routing: Routing, experts: Experts) -> Tensor:
            # The branches are those of a single rank, where a recipe's rounding must not depend on the weights either.
            by_row, afterwards = permute_weights(routing.weights, order, inverse), None
            rows = permute(tokens, order, inverse)
            if experts.weighted_inputs:
                rows, by_row = weigh_rows(rows, by_row), None
            elif experts.is_quantized:
                by_row, afterwards = None, routing.weights
            exchanged = exchange()
            received = exchanged.dispatch(rows, by_row)
            found = experts(received.rows, received.ends, received.weights)
            return combine(exchanged.give_back(found, received, rows.shape[0]), order, inverse, afterwards)

        return lambda: self._over_channels(tokens, Routing(chosen, routing.weights), experts, on_ranks)

    def _over_channels(
        self, tokens: Tensor, routing: Routing, experts: Experts, compute: Callable[[Tensor, Routing, Experts], Tensor]
    ) -> Tensor:
        """Outputs for this rank's tokens; `routing` has the weights of these and the choices of all ranks' tokens."""
        if self.channels is None:
            return compute(tokens, routing, experts)
        gathered = Routing(routing.experts, self.channels.gather(routing.weights))
        return self.channels.reduce(compute(self.channels.gather(tokens), gathered, experts))


def apply_expert_parallel(
    model: nn.Module, mesh: Mesh, *, sequence_parallel: bool, symmetric_memory: bool = False
) -> None:
    """Shard experts and replace their dispatch in place, unless they are sharded like other weights; names stay."""
    axes = mesh.experts
    if axes is None:
        return
    tp = mesh.sharding["tp"]
    tokens = TokenGroup(tp.get_group().group_name, tp.size(), tp.get_local_rank()) if tp.size() > 1 else None
    ep = axes["ep"]
    if symmetric_memory:
        use_symmetric_memory()
    for module in mixtures(model):
        channels = tokens if axes["etp"].size() > 1 else None
        module.dispatch = ExpertParallelDispatch(ep.get_group().group_name, ep.size(), channels, symmetric_memory)
        for linear, dim in ((module.experts.gate_up, 1), (module.experts.down, 2)):
            _shard(linear, axes, channels=dim)
            if axes["etp"].size() > 1:
                amax_reduce = partial(all_reduce, operation="max", group=axes["etp"].get_group().group_name)
                linear.linear_impl.shard(input_sharded=dim == 2, amax_reduce=amax_reduce)
        if tokens is not None:
            if isinstance(module, MoEFeedForward):
                mark_partial(module.router)
            module.token_split = None if sequence_parallel else tokens


def mixtures(model: nn.Module) -> list[Mixture]:
    """Mixture-of-experts layers of a model or pipeline stage, in order."""
    return [module for module in model.modules() if isinstance(module, Mixture)]


def _shard(linear: GroupedLinear, axes: torch.distributed.DeviceMesh, *, channels: int) -> None:
    """Shard weights [experts, out, in] over ep by experts, and over etp by the dim of the channels. Biases [experts,
    out] are sharded by outputs over etp; where outputs are summed over ranks, each bias is added by one rank only."""
    linear.weight = _divided(linear.weight, axes, dim=channels)
    if linear.bias is not None:
        linear.bias = _divided(linear.bias, axes, dim=1)
        if channels == 2:
            local = local_tensor(linear.bias.detach())
            linear.bias_start = axes["etp"].get_local_rank() * local.shape[1]


def _divided(parameter: nn.Parameter, axes: torch.distributed.DeviceMesh, dim: int) -> nn.Parameter:
    """This rank's shard of a parameter of experts, over etp along `dim`."""
    placements = {name: shard for name, shard in (("ep", Shard(0)), ("etp", Shard(dim))) if axes[name].size() > 1}
    if not placements:
        return parameter
    # src_data_rank=None: each rank slices its own copy, without communication.
    shards = list(placements.values())
    sharded = distribute_tensor(parameter.detach(), axes[tuple(placements)], shards, src_data_rank=None)
    return nn.Parameter(sharded, parameter.requires_grad)
