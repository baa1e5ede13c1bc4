"""Router of a mixture of experts: choice, weights, balance, and counts of tokens per expert."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from titan_exp.models.blocks.initialization import InitSpec
from titan_exp.models.blocks.linear import add_bias, weight_and_bias
from titan_exp.models.spec.moe import RouterSpec
from titan_exp.ops.moe.routing import (
    Routing,
    SumCounts,
    add_unless_recomputing,
    attach_loss,
    batch_balance_loss,
    choices_per_expert,
    choose_experts,
    expert_weights,
    normalized_scores,
    router_scores,
    router_z_loss,
    sequence_balance_loss,
)


class Router(nn.Module):
    """Routes each token to its experts, and balances them.

    Balance is defined over sequences or the global batch; the trainer says by `set_batch` how many sequences that has,
    and calls `finish_step` with the counts of the global batch after each optimizer step.
    """

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
        """Sequences of the global batch; the trainer's is a tensor [], fp32, since a compiled or captured pass would
        keep a number."""
        self.sequence_ranks = 1
        """Ranks that share each sequence, each with as many of its tokens."""
        self.sum_counts: SumCounts | None = None
        """Sum of counts over these ranks; None for one."""

    def forward(self, x: Float[Tensor, "batch part dim"]) -> Routing:
        """Route these tokens; in training also balance and count them."""
        moe = self.moe
        logits = F.linear(x.float(), self.weight.float()) if moe.fp32_router else F.linear(x, self.weight)
        logits = add_bias(logits, self.logit_bias).float()
        scores = router_scores(logits, sigmoid=moe.score == "sigmoid")
        # Sigmoids of large logits are all 1.
        ranking = logits if moe.score == "sigmoid" and moe.groups == 1 else scores
        experts = choose_experts(
            scores.detach() + self.bias if moe.router_bias else ranking,
            moe.active_experts,
            groups=moe.groups,
            active_groups=moe.active_groups,
            top2_groups=moe.group_score == "top2_sum",
        )
        weights = expert_weights(scores, experts, normalized=moe.normalized, scale=moe.scale)
        if torch.is_grad_enabled():
            weights = self._balanced(weights, logits, scores, experts)
        return Routing(experts.flatten(0, 1), weights.flatten(0, 1))

    def set_batch(self, sequences: Tensor | int, sequence_ranks: int = 1, sum_counts: SumCounts | None = None) -> None:
        """Set the sequences of the global batch, and the ranks that share each sequence with the sum over them."""
        self.sequences, self.sequence_ranks, self.sum_counts = sequences, sequence_ranks, sum_counts

    @torch.no_grad()
    def finish_step(self, counts: Int64[Tensor, " experts"]) -> None:
        """Update bias and load from the tokens per expert of the whole global batch, and count anew."""
        moe, exact = self.moe, counts.double()
        if moe.balance.bias_rate:
            change = moe.balance.bias_rate * (exact.mean() - exact).sign()
            self.bias.add_(change - change.mean() if moe.balance.centered_bias else change)
        if moe.balance.loss == "global_batch":
            self.previous_load.copy_(exact * (moe.experts / exact.sum().clamp(min=1)))
        self.counts.zero_()
        self.losses.zero_()

    def init_spec(self) -> dict[str, InitSpec]:
        """Initialization of the parameters by name."""
        return weight_and_bias(self.std, self.logit_bias_std, "logit_bias")

    @torch.no_grad()
    def reset_buffers(self) -> None:
        """Fill the buffers, once memory is real."""
        for name, buffer in self.named_buffers(recurse=False):
            buffer.fill_(1 if name == "previous_load" else 0)

    def _balanced(self, weights: Tensor, logits: Tensor, scores: Tensor, experts: Tensor) -> Tensor:
        """Count the tokens of each expert, and attach the gradients of the balance losses to the weights."""
        moe, balance = self.moe, self.moe.balance
        choices = choices_per_expert(experts.flatten(1), moe.experts)
        add_unless_recomputing(self.counts, choices.sum(0))
        length = experts.shape[1] * self.sequence_ranks
        loss = z_loss = None
        if balance.coefficient:
            loss = self._balance_loss(scores, choices, length) * (balance.coefficient / self.sequences)
        if balance.z_loss:
            z_loss = router_z_loss(logits) * (balance.z_loss / (self.sequences * length))
        losses = [term for term in (loss, z_loss) if term is not None]
        if not losses:
            return weights
        zero = torch.zeros((), device=weights.device)
        terms = [zero if term is None else term.detach() for term in (loss, z_loss)]
        add_unless_recomputing(self.losses, torch.stack(terms))
        return attach_loss(weights, sum(losses[1:], losses[0]))

    def _balance_loss(self, scores: Tensor, choices: Tensor, length: int) -> Tensor:
        """Sum over sequences of the balance loss, these tokens' part."""
        moe = self.moe
        if moe.balance.loss == "global_batch":
            return batch_balance_loss(normalized_scores(scores), self.previous_load) / length
        if self.sum_counts is not None:
            choices = self.sum_counts(choices)
        if moe.balance.loss == "switch":
            return sequence_balance_loss(scores, choices, length)
        return sequence_balance_loss(normalized_scores(scores), choices, length) / moe.active_experts
