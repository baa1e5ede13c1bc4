"""SwiGLU feed-forward with gate and up fused: its linears, dense or one per expert."""

from collections.abc import Iterator
from typing import Any

from titan_exp.config.errors.did_you_mean import listed, multiples_near
from titan_exp.config.errors.user_error import Violation
from titan_exp.models.spec.model_spec import LinearSpec
from titan_exp.models.spec.tp_plan import Colwise, FusedRows, ReplicatedGateUp, RowPiece, Rowwise

FFN_GROUP = 32
"""Gate and up rows alternate in groups of this many in the fused weight; `ops.swiglu` computes on them."""
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
    """Linears `name`.gate_up and `name`.down of `channels`, which the config's `key` sets; None is no biases."""
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
    """Widths that the fused feed-forward cannot compute, set by the config's `key`."""
    if channels % FFN_GROUP:
        yield Violation(
            key,
            channels,
            f"it is not a multiple of {FFN_GROUP}, the groups in which gate and up rows alternate",
            f"nearest: {key}={listed(multiples_near(channels, FFN_GROUP))}",
        )
