"""Token dispatch of expert parallelism: routed rows to the ranks of their experts, and their weighted sum back.

A rank routes its own tokens and sums their experts' outputs in fp32, in the order of their choices, so that numbers do
not depend on the number of ranks. Weights travel with the rows and scale the down projection's input, as on one rank:
backward then needs no returned row.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from titan_exp.models.blocks.feed_forward import Experts, compute_locally, weigh_rows
from titan_exp.ops.moe.permutation import combine, permute, permute_weights, sort_by_expert
from titan_exp.ops.moe.routing import Routing
from titan_exp.parallel.expert_parallel.symmetric_exchange import SymmetricExchange
from titan_exp.parallel.expert_parallel.token_exchange import TokenExchange
from titan_exp.parallel.expert_parallel.token_groups import TokenGroup


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
