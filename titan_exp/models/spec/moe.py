"""Mixture of experts of one layer: config of router, experts and load balance, which families share."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge

from titan_exp.config.groups.experiment import MAY_BE_MEANT, NO_CHANGE
from titan_exp.config.groups.types import Count, NonNegativeFloat, PositiveFloat, PositiveInt
from titan_exp.ops.swiglu_variant import SWIGLU, SwiGLUVariant

TRAINING_BUFFERS = frozenset({"previous_load"})
"""Persistent buffers, by their name in the module, that only training reads: state of the load balance."""


@dataclass(frozen=True)
class BalanceConfig:
    """Load balance of experts, defined over sequences or the global batch, so that no layout changes it."""

    loss: Literal["none", "switch", "sequence", "global_batch"]
    """Auxiliary loss, summed over layers: of each sequence (`switch`, `sequence`), or of the whole global batch.

    With f the share of choices and P the mean score of an expert: `switch` is E · Σ f · P over each sequence, f per
    token (Fedus et al. 2021; balanced: active_experts). `sequence` is the same with f per choice and scores divided by
    their sum (DeepSeek V3; balanced: 1). `global_batch` is `sequence` with f of the whole global batch of the step
    before (Qiu et al. 2025). E.g. `model=qwen3_moe_debug model.moe.balance.loss=sequence`."""
    coefficient: NonNegativeFloat
    """Factor of the auxiliary loss. E.g. `model=qwen3_moe_debug model.moe.balance.coefficient=1e-4`."""
    z_loss: NonNegativeFloat
    """Factor of the router z-loss, the mean of logsumexp(logits)² over tokens (Zoph et al. 2022).
    E.g. `model=qwen3_moe_debug model.moe.balance.z_loss=1e-3`."""
    bias_rate: NonNegativeFloat
    """Change of an expert's bias per step, up if it had fewer tokens than the mean and down if more (Wang et al. 2024).
    0 keeps the biases. E.g. `model=qwen3_moe_debug model.moe.balance.bias_rate=1e-3`."""
    centered_bias: bool
    """True removes the mean of the change, so that biases keep mean 0; choices stay the same.
    E.g. `model=qwen3_moe_debug model.moe.balance.centered_bias=false`."""


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts in place of a feed-forward layer."""

    experts: Annotated[int, Ge(2)]
    """Routed experts per layer. E.g. `model=qwen3_moe_debug model.moe.experts=16`."""
    active_experts: PositiveInt
    """Experts of each token (top k). E.g. `model=qwen3_moe_debug model.moe.active_experts=4`."""
    ffn_dim: PositiveInt
    """Width of an expert's SwiGLU; a multiple of 32. E.g. `model=qwen3_moe_debug model.moe.ffn_dim=256`."""
    shared_experts: Count
    """Experts of every token, as one SwiGLU of `shared_experts` · `ffn_dim`, without a gate.
    E.g. `model=qwen3_moe_debug model.moe.shared_experts=1`."""
    score: Literal["softmax", "sigmoid"]
    """Scores of the router's logits, in fp32. E.g. `model=qwen3_moe_debug model.moe.score=sigmoid`."""
    fp32_router: bool = field(metadata=MAY_BE_MEANT)
    """True computes the logits in fp32, False in the compute dtype.
    E.g. `model=qwen3_moe_debug model.moe.fp32_router=false`."""
    router_bias: bool
    """True adds a bias per expert to the scores for the choice, not for the weights (DeepSeek V3).
    E.g. `model=qwen3_moe_debug model.moe.router_bias=true`."""
    normalized: bool
    """True divides the weights of the chosen experts by their sum.
    E.g. `model=qwen3_moe_debug model.moe.normalized=false`."""
    scale: PositiveFloat
    """Factor of the weights. E.g. `model=qwen3_moe_debug model.moe.scale=2.5`."""
    groups: PositiveInt
    """Groups of experts, of which a token chooses from a few; 1 is no grouping.
    E.g. `model=qwen3_moe_debug model.moe.groups=8`."""
    active_groups: PositiveInt
    """Groups that a token chooses from. E.g. `model=qwen3_moe_debug model.moe.active_groups=4`."""
    group_score: Literal["max", "top2_sum"]
    """Score of a group: its highest score (DeepSeek V2), or the sum of its two highest (V3).
    E.g. `model=qwen3_moe_debug model.moe.group_score=top2_sum`."""
    balance: BalanceConfig = field(metadata=NO_CHANGE)
    """Load balance, over sequences or the global batch: the same in every layout.
    E.g. `model=qwen3_moe_debug model.moe.balance.loss=switch`."""


@dataclass(frozen=True, kw_only=True)
class MoEVariant:
    """Experts of one layer, beyond SwiGLU whose outputs are weighted."""

    swiglu: SwiGLUVariant = SWIGLU
    """Gate of every expert."""
    bias_std: float | None = None
    """Standard deviation of the initial biases of experts, 0 for zeros; None is no biases."""
    logit_bias_std: float | None = None
    """The same of the bias of the router's logits."""
    weighted_inputs: bool = False
    """True if weights multiply the inputs of experts, and not their outputs (Llama 4)."""


PLAIN_EXPERTS = MoEVariant()
"""SwiGLU without biases."""


@dataclass(frozen=True)
class RouterSpec:
    """Linear layer from a token to the logits of its experts; neither quantized nor sharded."""

    name: str
    """Module path inside the block (`feed_forward.router`)."""
    inputs: int
    """Input features."""
    std: float
    """Standard deviation of initial weights."""
    moe: MoEConfig
    """Experts that it chooses from."""
    logit_bias_std: float | None = None
    """Standard deviation of the initial bias of the logits, 0 for zeros; None is no bias."""
    weighted_inputs: bool = False
    """True if weights multiply the inputs of experts, and not their outputs."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter, by its name in the module. The bias that balances the load is no parameter."""
        bias = {} if self.logit_bias_std is None else {"logit_bias": (self.moe.experts,)}
        return {"weight": (self.moe.experts, self.inputs), **bias}

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return (self.inputs + (self.logit_bias_std is not None)) * self.moe.experts

    @property
    def flops_per_token(self) -> int:
        """Forward and backward FLOPs of the matmul per token."""
        return 6 * self.inputs * self.moe.experts

    @property
    def buffers(self) -> dict[str, tuple[int, ...]]:
        """Shape of each persistent fp32 buffer that outputs depend on, by its name in the module."""
        return {"bias": (self.moe.experts,)} if self.moe.router_bias else {}
