"""Token dispatch of expert parallelism: routed rows to the ranks of their experts, and their weighted sum back.

A rank routes its own tokens and sums their experts' outputs in fp32, in the order of their choices, so that numbers do
not depend on the number of ranks.
"""

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
    ) -> Float[Tensor, "tokens dim"]:
        """Weighted sum of the experts' outputs for this rank's tokens."""
        chosen, weights = routing.experts, routing.weights
        if self.channels is not None:
            tokens, weights = self.channels.gather(tokens), self.channels.gather(weights)
            chosen = self.channels.gather(chosen)
        order, inverse, ends = sort_by_expert(chosen, experts.count)
        rows = self._on_experts(permute(tokens, order, inverse), ends, experts)
        found = combine(rows, order, inverse, weights)
        return found if self.channels is None else self.channels.reduce(found)

    def _on_experts(self, rows: Tensor, ends: Tensor, experts: Experts) -> Tensor:
        if self.degree == 1:
            return experts(rows, ends)
        exchange = TokenExchange.of(ends, self.degree, self.group)
        received, order = exchange.dispatch(rows)
        return exchange.give_back(experts(received, exchange.ends), order, rows.shape[0])
