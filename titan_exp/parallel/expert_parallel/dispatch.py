"""Token dispatch of expert parallelism: routed rows to the ranks of their experts, and their weighted sum back.

A rank routes its own tokens and sums their experts' outputs in fp32, in the order of their choices, so that numbers do
not depend on the number of ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from titan_exp.models.blocks.moe import Experts
from titan_exp.ops.moe.permutation import combine, permute, sort_by_expert
from titan_exp.ops.moe.routing import Routing
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

    def __call__(
        self, tokens: Float[Tensor, "tokens dim"], routing: Routing, experts: Experts
    ) -> Callable[[], Float[Tensor, "tokens dim"]]:
        """Start to exchange counts; the result computes the weighted sum of the experts' outputs for these tokens."""
        chosen = routing.experts if self.channels is None else self.channels.gather(routing.experts)
        order, inverse, ends = sort_by_expert(chosen, experts.count)
        exchange = None if self.degree == 1 else TokenExchange.start(ends, self.degree, self.group)

        def finish() -> Tensor:
            weights, mine = routing.weights, tokens
            if self.channels is not None:
                mine, weights = self.channels.gather(mine), self.channels.gather(weights)
            rows = permute(mine, order, inverse)
            rows = experts(rows, ends) if exchange is None else _on_ranks(exchange(), rows, experts)
            found = combine(rows, order, inverse, weights)
            return found if self.channels is None else self.channels.reduce(found)

        return finish


def _on_ranks(exchange: TokenExchange, rows: Tensor, experts: Experts) -> Tensor:
    """Outputs of the experts on other ranks."""
    received, order = exchange.dispatch(rows)
    return exchange.give_back(experts(received, exchange.ends), order, rows.shape[0])
