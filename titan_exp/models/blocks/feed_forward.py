"""Feed-forward layers: SwiGLU (Shazeer 2020) with gate and up fused, and the mixture of experts in its place."""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int32, Int64
from torch import Tensor, nn

from titan_exp.models.blocks import linear as linears
from titan_exp.models.blocks.linear import GroupedLinear, GroupedLinearImpl, InitSpec, Planned, add_bias, linear
from titan_exp.models.spec.feed_forward import FFN_GROUP
from titan_exp.models.spec.model_spec import LayerSpec
from titan_exp.models.spec.moe import RouterSpec
from titan_exp.models.spec.tp_plan import TPStyle
from titan_exp.ops.autograd import recompute_input
from titan_exp.ops.moe import routing as routing_ops
from titan_exp.ops.moe.permutation import PaddedOrder, TokenPadding, combine, permute, permute_weights, sort_by_expert
from titan_exp.ops.swiglu import GROUP, swiglu

Hidden = Float[Tensor, "batch part dim"]


class FeedForward(Planned):
    """SwiGLU feed-forward with gate and up fused, their rows alternating in groups (see `ops.swiglu`)."""

    def __init__(self, layer: LayerSpec, name: str = "feed_forward") -> None:
        super().__init__(layer, name)
        assert FFN_GROUP == GROUP, "rows are fused as the operator reads them"
        assert layer.linear(f"{name}.down").inputs % GROUP == 0, "checked by the family's rules"
        self.group, self.variant = GROUP, layer.swiglu
        self.gate_up = linear(layer, f"{name}.gate_up")
        self.down = linear(layer, f"{name}.down")

    def forward(self, x: Float[Tensor, "batch seq dim"]) -> Float[Tensor, "batch seq dim"]:
        """down(silu(gate(x)) · up(x)), or a variant."""
        return recompute_input(lambda fused: swiglu(fused, self.group, self.variant), self.gate_up(x), self.down)


class Router(nn.Module):
    """Routes each token to its experts, and balances them. Balance is defined over sequences or the global batch. The
    trainer sets the batch's number of sequences by `set_batch`, and calls `finish_step` with the token counts of the
    global batch after each optimizer step."""

    bias: Tensor
    previous_load: Tensor
    counts: Tensor
    losses: Tensor

    def __init__(self, spec: RouterSpec) -> None:
        super().__init__()
        moe = self.moe = spec.moe
        self.std, self.logit_bias_std = spec.std, spec.logit_bias_std
        self.weight = nn.Parameter(torch.empty(moe.experts, spec.inputs))
        self.logit_bias = None if spec.logit_bias_std is None else nn.Parameter(torch.empty(moe.experts))
        if moe.router_bias:
            self.register_buffer("bias", torch.zeros(moe.experts))
        if moe.balance.loss == "global_batch":
            self.register_buffer("previous_load", torch.ones(moe.experts))
        self.register_buffer("counts", torch.zeros(moe.experts, dtype=torch.int64), persistent=False)
        self.register_buffer("losses", torch.zeros(2), persistent=False)
        self.sequences: Tensor | int = 1
        """Sequences of the global batch. The trainer sets an fp32 tensor [], since a compiled or captured pass would
        bake in a number."""
        self.sequence_ranks = 1
        """Ranks that share each sequence, each with equally many of its tokens."""
        self.sum_counts: routing_ops.SumCounts | None = None
        """Function that sums counts over these ranks; None if there is one."""
        self.recomputed = True
        """False if no backward pass repeats this forward pass, so that it need not check whether to count."""

    def forward(self, x: Hidden) -> routing_ops.Routing:
        """Route these tokens; in training also balance and count them."""
        moe = self.moe
        logits = F.linear(x.float(), self.weight.float()) if moe.fp32_router else F.linear(x, self.weight)
        logits = add_bias(logits, self.logit_bias).float()
        scores = routing_ops.router_scores(logits, sigmoid=moe.score == "sigmoid")
        # Sigmoids of large logits are all 1, so the logits rank experts.
        ranking = logits if moe.score == "sigmoid" and moe.groups == 1 else scores
        experts = routing_ops.choose_experts(
            scores.detach() + self.bias if moe.router_bias else ranking,
            moe.active_experts,
            groups=moe.groups,
            active_groups=moe.active_groups,
            top2_groups=moe.group_score == "top2_sum",
        )
        weights = routing_ops.expert_weights(scores, experts, normalized=moe.normalized, scale=moe.scale)
        order = None
        if torch.is_grad_enabled():
            weights, order = self._balanced(weights, logits, scores, experts)
        return routing_ops.Routing(experts.flatten(0, 1), weights.flatten(0, 1), order)

    def set_batch(
        self, sequences: Tensor | int, sequence_ranks: int = 1, sum_counts: routing_ops.SumCounts | None = None
    ) -> None:
        """Set the number of sequences of the global batch, the ranks that share each sequence, and the sum over
        them."""
        self.sequences, self.sequence_ranks, self.sum_counts = sequences, sequence_ranks, sum_counts

    def finish_step(self, counts: Int64[Tensor, " experts"]) -> None:
        """Update bias and load from the global batch's tokens per expert, then reset the counts."""
        moe = self.moe
        if moe.balance.bias_rate:
            change = moe.balance.bias_rate * (counts.double().mean() - counts).sign()
            self.bias.add_(change - change.mean() if moe.balance.centered_bias else change)
        if moe.balance.loss == "global_batch":
            self.previous_load.copy_(counts * (moe.experts / counts.sum().double().clamp(min=1)))
        self.counts.zero_()
        self.losses.zero_()

    def init_spec(self) -> dict[str, InitSpec]:
        return linears.weight_and_bias(self.std, self.logit_bias_std, "logit_bias")

    @torch.no_grad()
    def reset_buffers(self) -> None:
        for name, buffer in self.named_buffers(recurse=False):
            buffer.fill_(1 if name == "previous_load" else 0)

    def _balanced(
        self, weights: Tensor, logits: Tensor, scores: Tensor, experts: Tensor
    ) -> tuple[Tensor, routing_ops.Sorted | None]:
        """Count the tokens of each expert, and attach the gradients of the balance losses to the weights. Returns also
        the sorted choices, unless each sequence was counted by itself."""
        moe, balance = self.moe, self.moe.balance
        choices = order = None
        if balance.coefficient and balance.loss in {"switch", "sequence"}:
            choices = routing_ops.choices_per_expert(experts.flatten(1), moe.experts)
            counts = choices.sum(0)
        else:
            order = sort_by_expert(experts.flatten(0, 1), moe.experts)
            ends = order[-1]
            counts = ends.diff(prepend=ends.new_zeros(1))
        count = routing_ops.add_unless_recomputing if self.recomputed else Tensor.add_
        count(self.counts, counts)
        length = experts.shape[1] * self.sequence_ranks
        loss = z_loss = None
        if balance.coefficient:
            loss = self._balance_loss(scores, choices, length) * (balance.coefficient / self.sequences)
        if balance.z_loss:
            z_loss = routing_ops.router_z_loss(logits) * (balance.z_loss / (self.sequences * length))
        losses = [term for term in (loss, z_loss) if term is not None]
        if not losses:
            return weights, order
        zero = torch.zeros((), device=weights.device)
        terms = [zero if term is None else term.detach() for term in (loss, z_loss)]
        count(self.losses, torch.stack(terms))
        return routing_ops.attach_loss(weights, sum(losses[1:], losses[0])), order

    def _balance_loss(self, scores: Tensor, choices: Tensor | None, length: int) -> Tensor:
        """Part of the balance loss that these tokens contribute, summed over sequences."""
        moe = self.moe
        if moe.balance.loss == "global_batch":
            return routing_ops.batch_balance_loss(routing_ops.normalized_scores(scores), self.previous_load) / length
        assert choices is not None, "sequences are counted one by one"
        if self.sum_counts is not None:
            choices = self.sum_counts(choices)
        if moe.balance.loss == "switch":
            return routing_ops.sequence_balance_loss(scores, choices, length)
        return (
            routing_ops.sequence_balance_loss(routing_ops.normalized_scores(scores), choices, length)
            / moe.active_experts
        )


class Experts(nn.Module):
    """SwiGLU of all experts, on rows sorted by expert."""

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__()
        self.gate_up = _grouped(layer, "feed_forward.experts.gate_up")
        self.down = _grouped(layer, "feed_forward.experts.down")
        self.variant, self.fused_rows = layer.swiglu, layer.fused_rows("feed_forward.experts")
        self.weighted_inputs = layer.router is not None and layer.router.weighted_inputs
        """True if weights multiply the rows that go in, rather than those that come out."""
        self.count = self.gate_up.experts
        """Number of experts in the layer."""

    @property
    def is_quantized(self) -> bool:
        """True if a recipe rounds the input of the down projection."""
        return type(self.down.linear_impl) is not GroupedLinearImpl

    @property
    def row_multiple(self) -> int:
        """Multiple of rows per expert to pad to, once for both matmuls. It is 1 with biases, which would turn the
        padding zeros into other numbers; then the matmuls pad on their own."""
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
        `ends` are the ends of the experts' rows. With `order`, `rows` are tokens and the result has their rows in this
        order."""
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


Dispatch = Callable[[Tensor, routing_ops.Routing, Experts], Callable[[], Tensor]]
"""Starts to send tokens [tokens, dim] to the experts that they are routed to.

The result computes the experts' outputs, weighted and summed [tokens, dim]. The messages travel between the two calls.
"""


class TokenSplit(Protocol):
    """Split of each sequence among ranks that all have its tokens."""

    def split(self, x: Tensor) -> Tensor:
        """Take this rank's part [batch, part, dim] of [batch, seq, dim]."""
        ...

    def join(self, part: Tensor, length: int) -> Tensor:
        """Join the ranks' parts to whole sequences of `length` tokens."""
        ...


class Mixture(nn.Module):
    """Layer with experts. `dispatch` sends tokens to them; expert parallelism replaces it."""

    experts: Experts

    def __init__(self) -> None:
        super().__init__()
        self.dispatch: Dispatch = dispatch_locally
        self.token_split: TokenSplit | None = None
        """Split of tokens that several ranks hold; None if this rank routes all of its tokens."""


class MoEFeedForward(Mixture):
    """Mixture of experts: a router and its experts."""

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__()
        assert layer.router is not None, "the layer has a router"
        self.router = Router(layer.router)
        self.experts = Experts(layer)
        has_shared = layer.router.moe.shared_experts > 0
        self.shared = FeedForward(layer, "feed_forward.shared") if has_shared else None
        is_gated = any(part.name == "feed_forward.shared_gate" for part in layer.linears)
        self.shared_gate = linear(layer, "feed_forward.shared_gate") if is_gated else None
        self._plan = {name: style for name, style in layer.tp_plan("feed_forward").items() if name == "shared_gate"}

    def tp_plan(self) -> dict[str, TPStyle]:
        return self._plan

    def forward(self, x: Hidden) -> Hidden:
        """Return the weighted sum of the routed experts' outputs, plus the shared experts', which may have a gate."""
        part = x if self.token_split is None else self.token_split.split(x)
        finish = self.dispatch(part.flatten(0, 1), self.router(part), self.experts)
        shared = None if self.shared is None else self.shared(x)
        if shared is not None and self.shared_gate is not None:
            shared = shared * self.shared_gate(x).sigmoid()
        found = finish().view_as(part)
        if self.token_split is not None:
            found = self.token_split.join(found, x.shape[1])
        return found if shared is None else found + shared


def dispatch_locally(tokens: Tensor, routing: routing_ops.Routing, experts: Experts) -> Callable[[], Tensor]:
    """Dispatch to experts that are all on this rank."""
    return lambda: compute_locally(tokens, routing, experts)


def compute_locally(tokens: Tensor, routing: routing_ops.Routing, experts: Experts) -> Tensor:
    """Weighted sum of the outputs of experts that are all on this rank."""
    if experts.row_multiple > 1 and not experts.weighted_inputs:
        # Permuting puts rows where the matmuls read them.
        order = PaddedOrder.sort(routing.experts, experts.count, experts.row_multiple)
        weights = None if experts.is_quantized else permute_weights(routing.weights, order.order, order.inverse)
        rows = experts(tokens, order.ends, weights, order)
        return combine(rows, order.order, order.inverse, routing.weights if weights is None else None, order.padding)
    by_expert, inverse, ends = routing.order or sort_by_expert(routing.experts, experts.count)
    if experts.weighted_inputs:
        by_row = permute_weights(routing.weights, by_expert, inverse)
        rows = recompute_input(
            lambda tokens: permute(tokens, by_expert, inverse),
            tokens,
            lambda rows: recompute_input(
                lambda rows: weigh_rows(rows, by_row), rows, lambda weighed: experts(weighed, ends)
            ),
        )
        return combine(rows, by_expert, inverse, None)
    # Outputs that are weighted before the down projection need not be kept for the gradient of the weights. But what
    # a recipe rounds would then differ from what other ranks' experts round.
    weights = None if experts.is_quantized else permute_weights(routing.weights, by_expert, inverse)
    rows = recompute_input(
        lambda tokens: permute(tokens, by_expert, inverse), tokens, lambda rows: experts(rows, ends, weights)
    )
    return combine(rows, by_expert, inverse, routing.weights if weights is None else None)


def weigh_rows(rows: Tensor, weights: Tensor) -> Tensor:
    """Multiply rows [rows, dim] by their weights, in the dtype of the rows."""
    return rows * weights.to(rows.dtype)[:, None]


def _grouped(layer: LayerSpec, name: str) -> GroupedLinear:
    spec = layer.linear(name)
    return GroupedLinear(spec.experts, spec.inputs, spec.outputs, spec.std, spec.bias_std if spec.bias else None)
