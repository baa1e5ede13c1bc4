"""Mixture of experts of one layer: config of router, experts and load balance, which families share."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge

from titan_exp.config.groups.experiment import MAY_BE_MEANT, NO_CHANGE
from titan_exp.config.groups.types import Count, NonNegativeFloat, PositiveFloat, PositiveInt
from titan_exp.ops.swiglu_variant import SWIGLU, SwiGLUVariant

TRAINING_BUFFERS = frozenset({"previous_load"})
"""Persistent buffers that only training reads, by name in the module: the state of the load balance."""


@dataclass(frozen=True)
class BalanceConfig:
    """Load balance of experts, defined over sequences or the global batch, so that no layout changes it."""

    loss: Literal["none", "switch", "sequence", "global_batch"]
    """Auxiliary loss of the load balance, summed over layers: over each sequence (`switch`, `sequence`), or over the
    whole global batch (`global_batch`). `none` adds none.

    With f the share of choices and P the mean score of an expert, `switch` is E · Σ f · P over each sequence, with f
    per token (Fedus et al. 2021). Balanced routing gives active_experts. `sequence` has f per choice, and scores
    divided by their sum (DeepSeek V3). Balanced routing gives 1. `global_batch` is `sequence` with the f of the
    previous step's whole global batch (Qiu et al. 2025).
    E.g. `model=qwen3_moe_debug model.moe.balance.loss=sequence`."""
    coefficient: NonNegativeFloat
    """Coefficient of the auxiliary loss. E.g. `model=qwen3_moe_debug model.moe.balance.coefficient=1e-4`."""
    z_loss: NonNegativeFloat
    """Coefficient of the router z-loss, the mean of logsumexp(logits)² over tokens (Zoph et al. 2022).
    E.g. `model=qwen3_moe_debug model.moe.balance.z_loss=1e-3`."""
    bias_rate: NonNegativeFloat
    """Change of an expert's bias per step: up if the expert had fewer tokens than the mean, and down if it had more
    (Wang et al. 2024). 0 keeps the biases. E.g. `model=qwen3_moe_debug model.moe.balance.bias_rate=1e-3`."""
    centered_bias: bool
    """True if the mean of the changes is subtracted from them, so that the biases keep a mean of 0. Choices stay the
    same. E.g. `model=qwen3_moe_debug model.moe.balance.centered_bias=false`."""


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts in place of a feed-forward layer."""

    experts: Annotated[int, Ge(2)]
    """Number of routed experts per layer. E.g. `model=qwen3_moe_debug model.moe.experts=16`."""
    active_experts: PositiveInt
    """Number of experts that each token uses (top k). E.g. `model=qwen3_moe_debug model.moe.active_experts=4`."""
    ffn_dim: PositiveInt
    """Width of an expert's SwiGLU, a multiple of 32. E.g. `model=qwen3_moe_debug model.moe.ffn_dim=256`."""
    shared_experts: Count
    """Number of shared experts, which every token uses. They are one SwiGLU of width `shared_experts` · `ffn_dim`. Only
    Qwen3-Next and Qwen3.5 multiply its output by a gate. E.g. `model=qwen3_moe_debug model.moe.shared_experts=1`."""
    score: Literal["softmax", "sigmoid"]
    """Score function of the router's logits, in fp32: `softmax` or `sigmoid`.
    E.g. `model=qwen3_moe_debug model.moe.score=sigmoid`."""
    fp32_router: bool = field(metadata=MAY_BE_MEANT)
    """True if the router computes its logits in fp32, and false if it does so in the compute dtype.
    E.g. `model=qwen3_moe_debug model.moe.fp32_router=false`."""
    router_bias: bool
    """True if a bias per expert is added to the scores for the choice of experts, but not for their weights (DeepSeek
    V3). E.g. `model=qwen3_moe_debug model.moe.router_bias=true`."""
    normalized: bool
    """True if the weights of a token's chosen experts are divided by their sum.
    E.g. `model=qwen3_moe_debug model.moe.normalized=false`."""
    scale: PositiveFloat
    """Factor of the chosen experts' weights. E.g. `model=qwen3_moe_debug model.moe.scale=2.5`."""
    groups: PositiveInt
    """Number of groups of experts. A token chooses its experts from `active_groups` of them, and 1 means no grouping.
    E.g. `model=qwen3_moe_debug model.moe.groups=8`."""
    active_groups: PositiveInt
    """Number of groups that a token chooses its experts from.
    E.g. `model=qwen3_moe_debug model.moe.active_groups=4`."""
    group_score: Literal["max", "top2_sum"]
    """Score of a group: `max` is its highest score (DeepSeek V2), and `top2_sum` is the sum of its two highest (V3).
    E.g. `model=qwen3_moe_debug model.moe.group_score=top2_sum`."""
    balance: BalanceConfig = field(metadata=NO_CHANGE)
    """Load balance of the experts, over sequences or the global batch, so that it is the same in every layout.
    E.g. `model=qwen3_moe_debug model.moe.balance.loss=switch`."""


@dataclass(frozen=True, kw_only=True)
class MoEVariant:
    """Variant of a layer's experts, beyond SwiGLU with weighted outputs."""

    swiglu: SwiGLUVariant = SWIGLU  # gate of every expert
    bias_std: float | None = None
    """Standard deviation of the experts' initial biases, 0 for zeros; None means no biases."""
    logit_bias_std: float | None = None
    """Standard deviation of the initial bias of the router's logits, 0 for zeros; None means no bias."""
    weighted_inputs: bool = False  # True if weights multiply the experts' inputs instead of their outputs (Llama 4)
    gated_shared: bool = False
    """True if the sigmoid of one number per token multiplies the output of the shared experts (Qwen3-Next)."""


PLAIN_EXPERTS = MoEVariant()  # SwiGLU without biases


@dataclass(frozen=True)
class RouterSpec:
    """Router: linear layer from a token to the logits of its experts, neither quantized nor sharded."""

    name: str  # module path inside the block (`feed_forward.router`)
    inputs: int  # input features
    std: float  # standard deviation of initial weights
    moe: MoEConfig  # mixture-of-experts configuration that it chooses by
    logit_bias_std: float | None = None
    """Standard deviation of the initial bias of the logits, 0 for zeros; None means no bias."""
    weighted_inputs: bool = False  # True if weights multiply the experts' inputs instead of their outputs

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter, by name in the module. The bias that balances the load is not a parameter."""
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
