"""Feed-forward of a layer: linears and shape rules of SwiGLU with fused gate and up, dense or one per expert."""

from collections.abc import Iterator
from typing import Any

from titan_exp.config.errors.user_error import Violation, divisors, listed, multiples_near, nearest_numbers
from titan_exp.models.spec.model_spec import LinearSpec
from titan_exp.models.spec.moe import MoEConfig
from titan_exp.models.spec.tp_plan import SEQUENCE_PARALLEL, Colwise, FusedRows, ReplicatedGateUp, RowPiece, Rowwise

FFN_GROUP = 32
"""Rows per group: gate and up rows alternate in groups of this many in the fused weight (see `ops.swiglu`)."""
GATE_UP = FusedRows("feed_forward", (RowPiece("gate", FFN_GROUP), RowPiece("up", FFN_GROUP)))
"""Rows of a fused gate and up."""


def swiglu_linears(
    name: str,
    dim: int,
    channels: int,
    *,
    std: float,
    out_std: float,
    key: str,
    experts: int = 1,
    active: int = 1,
    bias_std: float | None = None,
) -> tuple[LinearSpec, LinearSpec]:
    """Linears `name`.gate_up and `name`.down of `channels`, which the config's `key` sets. A `bias_std` of None means
    no biases."""
    split = ReplicatedGateUp(FFN_GROUP, count="group") if experts == 1 else None
    described = f"{channels} feed-forward channels ({key})"
    gate_up = Colwise(channels // FFN_GROUP, split, described, key=key, width=FFN_GROUP)
    stacked: dict[str, Any] = {"experts": experts, "active_experts": active}
    stacked |= {} if bias_std is None else {"bias": True, "bias_std": bias_std}
    return (
        LinearSpec(f"{name}.gate_up", dim, 2 * channels, std, gate_up, rows=GATE_UP, **stacked),
        LinearSpec(f"{name}.down", channels, dim, out_std, Rowwise(), **stacked, writes_residual=True),
    )


def swiglu_violations(channels: int, key: str) -> Iterator[Violation]:
    """Violations by widths, set by the config's `key`, that the fused feed-forward cannot compute."""
    if channels % FFN_GROUP:
        reason = f"gate and up rows alternate in groups of {FFN_GROUP}, so this must be a multiple of {FFN_GROUP}"
        yield Violation(key, channels, reason, f"nearest: {key}={listed(multiples_near(channels, FFN_GROUP))}")


def moe_linears(
    config: MoEConfig, dim: int, *, std: float, out_std: float, bias_std: float | None = None
) -> tuple[LinearSpec, ...]:
    """Linears of all experts of a layer, with biases if `bias_std` is given, and of its shared experts."""
    key = "model.moe.ffn_dim"
    routed = swiglu_linears(
        "feed_forward.experts",
        dim,
        config.ffn_dim,
        std=std,
        out_std=out_std,
        key=key,
        experts=config.experts,
        active=config.active_experts,
        bias_std=bias_std,
    )
    if not config.shared_experts:
        return routed
    channels = config.shared_experts * config.ffn_dim
    return (*routed, *swiglu_linears("feed_forward.shared", dim, channels, std=std, out_std=out_std, key=key))


def shared_gate(dim: int, std: float) -> LinearSpec:
    """Linear whose sigmoid multiplies the output of the shared experts, one number per token."""
    return LinearSpec("feed_forward.shared_gate", dim, 1, std, SEQUENCE_PARALLEL, full_precision=True)


def moe_violations(config: MoEConfig, key: str = "model.moe") -> Iterator[Violation]:
    """Violations by numbers of experts, groups and channels that do not fit together."""
    if config.active_experts > config.experts:
        reason = f"a layer has only {key}.experts={config.experts} experts"
        remedy = f"use {key}.active_experts={config.experts} or less"
        yield Violation(f"{key}.active_experts", config.active_experts, reason, remedy)
    yield from swiglu_violations(config.ffn_dim, f"{key}.ffn_dim")
    if config.experts % config.groups:
        reason = f"it does not divide the {config.experts} experts ({key}.experts)"
        remedy = f"nearest: {key}.groups={listed(nearest_numbers(config.groups, divisors(config.experts)))}"
        yield Violation(f"{key}.groups", config.groups, reason, remedy)
    elif config.active_groups > config.groups:
        reason = f"the experts form only {key}.groups={config.groups} group{'s' * (config.groups > 1)}"
        remedy = f"use {key}.active_groups={config.groups} or less"
        yield Violation(f"{key}.active_groups", config.active_groups, reason, remedy)
    elif config.active_groups * (config.experts // config.groups) < config.active_experts <= config.experts:
        fewest = -(-config.active_experts * config.groups // config.experts)
        reason = (
            f"{config.active_groups} of {config.groups} groups of {config.experts // config.groups} experts cannot "
            f"hold {config.active_experts} active experts"
        )
        remedy = f"use {key}.active_groups={listed(range(fewest, config.groups + 1))}"
        yield Violation(f"{key}.active_groups", config.active_groups, reason, remedy)
    elif config.group_score == "top2_sum" and config.groups > 1 and config.experts // config.groups < 2:
        reason = "it adds the scores of two experts, and each group has one"
        yield Violation(f"{key}.group_score", config.group_score, reason, f"use {key}.group_score=max")
    if config.balance.bias_rate and not config.router_bias:
        reason = "the router has no bias to change"
        remedy = f"use {key}.router_bias=true, or {key}.balance.bias_rate=0"
        yield Violation(f"{key}.balance.bias_rate", config.balance.bias_rate, reason, remedy)
    if config.balance.coefficient and config.balance.loss == "none":
        reason = f"it multiplies a loss, and {key}.balance.loss is none"
        remedy = f"use {key}.balance.loss=sequence, or {key}.balance.coefficient=0"
        yield Violation(f"{key}.balance.coefficient", config.balance.coefficient, reason, remedy)
