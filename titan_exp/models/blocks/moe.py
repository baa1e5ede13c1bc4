"""Mixture of experts in place of a feed-forward layer: router, experts, shared experts."""

from collections.abc import Callable
from typing import Protocol

from jaxtyping import Float, Int32
from torch import Tensor, nn

from titan_exp.models.blocks.feed_forward import FeedForward
from titan_exp.models.blocks.grouped_linear import GroupedLinear
from titan_exp.models.blocks.linear_impl import GroupedLinearImpl
from titan_exp.models.blocks.router import Router
from titan_exp.models.spec.model_spec import LayerSpec
from titan_exp.ops.autograd import recompute_input
from titan_exp.ops.moe.permutation import PaddedOrder, TokenPadding, combine, permute, permute_weights, sort_by_expert
from titan_exp.ops.moe.routing import Routing
from titan_exp.ops.swiglu import swiglu


class Experts(nn.Module):
    """SwiGLU of every expert, on rows sorted by expert."""

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__()
        self.gate_up = _grouped(layer, "feed_forward.experts.gate_up")
        self.down = _grouped(layer, "feed_forward.experts.down")
        self.variant, self.fused_rows = layer.swiglu, layer.fused_rows("feed_forward.experts")
        self.weighted_inputs = layer.router is not None and layer.router.weighted_inputs
        """True if weights multiply the rows that go in, and not those that come out."""
        self.count = self.gate_up.experts
        """Experts of the layer."""

    @property
    def is_quantized(self) -> bool:
        """True if a recipe rounds what is projected down."""
        return type(self.down.linear_impl) is not GroupedLinearImpl

    @property
    def row_multiple(self) -> int:
        """Multiple of rows per expert to pad to, once for both matmuls.

        It is 1 where a bias would make numbers of the zeros in between: there the matmuls pad themselves.
        """
        if self.gate_up.bias is not None:
            return 1
        return max(self.gate_up.linear_impl.row_multiple, self.down.linear_impl.row_multiple)

    def forward(
        self,
        rows: Float[Tensor, "rows dim"],
        ends: Int32[Tensor, " experts"],
        weights: Float[Tensor, " _"] | None = None,
        order: PaddedOrder | None = None,
    ) -> Float[Tensor, "_ dim"]:
        """down(silu(gate(x)) · up(x)) of each row's expert, times the row's weight if given; or a variant of SwiGLU.

        `ends` are the ends of the experts' rows. `order` takes tokens in place of their rows in this order, and returns
        rows in it.
        """
        if order is not None:
            return self._down(self.gate_up(rows, ends, order=order), ends, weights, padded=True)
        if self.row_multiple == 1:
            return self._down(self.gate_up(rows, ends), ends, weights)
        padding = TokenPadding.of(ends, rows.shape[0], self.row_multiple)
        weights = None if weights is None else padding.spread(weights[:, None])[:, 0]
        fused = self.gate_up(padding.spread(rows), padding.ends, padded=True)
        return padding.collect(self._down(fused, padding.ends, weights, padded=True))

    def _down(self, fused: Tensor, ends: Tensor, weights: Tensor | None, *, padded: bool = False) -> Tensor:
        variant = self.variant
        if weights is not None:
            return self.down(fused, ends, weights, of_swiglu=variant)
        return recompute_input(
            lambda fused: swiglu(fused, variant=variant), fused, lambda hidden: self.down(hidden, ends, padded=padded)
        )


Dispatch = Callable[[Tensor, Routing, Experts], Callable[[], Tensor]]
"""Starts to bring tokens [tokens, dim] to the experts that they are routed to.

The result computes the experts' outputs, weighted and summed [tokens, dim]. Between the two calls, messages are under
way.
"""


class TokenSplit(Protocol):
    """Split of each sequence among ranks that all have its tokens."""

    def split(self, x: Tensor) -> Tensor:
        """This rank's part [batch, part, dim] of [batch, seq, dim]."""
        ...

    def join(self, part: Tensor, length: int) -> Tensor:
        """The whole sequences of `length` tokens from the ranks' parts."""
        ...


class MoEFeedForward(nn.Module):
    """Router and experts; `dispatch` brings tokens to experts, which expert parallelism replaces."""

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__()
        assert layer.router is not None, "the layer has a router"
        self.router = Router(layer.router)
        self.experts = Experts(layer)
        has_shared = layer.router.moe.shared_experts > 0
        self.shared = FeedForward(layer, "feed_forward.shared") if has_shared else None
        self.dispatch: Dispatch = dispatch_locally
        self.token_split: TokenSplit | None = None
        """Split of tokens that several ranks have; None if this rank routes all of its tokens."""

    def forward(self, x: Float[Tensor, "batch part dim"]) -> Float[Tensor, "batch part dim"]:
        """Weighted sum of the routed experts, plus the shared ones."""
        part = x if self.token_split is None else self.token_split.split(x)
        finish = self.dispatch(part.flatten(0, 1), self.router(part), self.experts)
        shared = None if self.shared is None else self.shared(x)
        found = finish().view_as(part)
        if self.token_split is not None:
            found = self.token_split.join(found, x.shape[1])
        return found if shared is None else found + shared


def dispatch_locally(tokens: Tensor, routing: Routing, experts: Experts) -> Callable[[], Tensor]:
    """Dispatch to experts that are all on this rank."""
    return lambda: compute_locally(tokens, routing, experts)


def compute_locally(tokens: Tensor, routing: Routing, experts: Experts) -> Tensor:
    """Weighted sum of the outputs of experts that are all on this rank."""
    if experts.row_multiple > 1 and not experts.weighted_inputs:
        return _compute_padded(tokens, routing, experts)
    order, inverse, ends = sort_by_expert(routing.experts, experts.count)
    if experts.weighted_inputs:
        by_row = permute_weights(routing.weights, order, inverse)
        rows = recompute_input(
            lambda tokens: permute(tokens, order, inverse),
            tokens,
            lambda rows: recompute_input(
                lambda rows: weigh_rows(rows, by_row), rows, lambda weighed: experts(weighed, ends)
            ),
        )
        return combine(rows, order, inverse, None)
    # Outputs that are weighted before the down projection need not be kept for the gradient of the weights. But what
    # a recipe rounds would then differ from what other ranks' experts round.
    weights = None if experts.is_quantized else permute_weights(routing.weights, order, inverse)
    rows = recompute_input(
        lambda tokens: permute(tokens, order, inverse), tokens, lambda rows: experts(rows, ends, weights)
    )
    return combine(rows, order, inverse, routing.weights if weights is None else None)


def _compute_padded(tokens: Tensor, routing: Routing, experts: Experts) -> Tensor:
    """The same for kernels that need padded rows: they lie where the matmuls read them, and nothing moves them."""
    order = PaddedOrder.sort(routing.experts, experts.count, experts.row_multiple)
    weights = None if experts.is_quantized else permute_weights(routing.weights, order.order, order.inverse)
    rows = experts(tokens, order.ends, weights, order)
    return combine(rows, order.order, order.inverse, routing.weights if weights is None else None, order.padding)


def weigh_rows(rows: Tensor, weights: Tensor) -> Tensor:
    """Rows [rows, dim] times their weights, in the dtype of the rows."""
    return rows * weights.to(rows.dtype)[:, None]


def _grouped(layer: LayerSpec, name: str) -> GroupedLinear:
    spec = layer.linear(name)
    return GroupedLinear(spec.experts, spec.inputs, spec.outputs, spec.std, spec.bias_std if spec.bias else None)
