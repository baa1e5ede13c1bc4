"""Muon (Jordan et al. 2024; Liu et al. 2025): orthogonalized momentum for matrices, AdamW for the rest."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Interval

from titan_exp.config.groups.optimizer import SplitMatrixOptimizerConfig
from titan_exp.config.groups.types import PositiveFloat, PositiveInt

if TYPE_CHECKING:
    import torch

    from titan_exp.optim.parameter_groups import NamedParameter


@dataclass(frozen=True, kw_only=True)
class Config(SplitMatrixOptimizerConfig):
    """Fields of Muon."""

    momentum: Annotated[float, Interval(ge=0, lt=1)]
    """Decay rate of a matrix's momentum. E.g. `optimizer=muon optimizer.momentum=0.9`."""
    nesterov: bool
    """Use Nesterov momentum. E.g. `optimizer=muon optimizer.nesterov=false`."""
    newton_schulz_steps: PositiveInt
    """Newton–Schulz iterations. E.g. `optimizer=muon optimizer.newton_schulz_steps=6`."""
    precision: Literal["bf16", "fp32"]
    """Precision of Newton–Schulz and of the messages with matrices. `bf16` is as published; in `fp32` every layout
    computes one device's update to rounding. E.g. `optimizer=muon optimizer.precision=bf16`."""
    scale: Literal["match_rms_adamw", "original", "none"]
    """Factor of the learning rate of a matrix: `match_rms_adamw` is 0.2 · sqrt(max(rows, columns)), `original` is
    sqrt(max(1, rows / columns)).

    The first makes updates as large as AdamW's, so that one learning rate serves all (Liu et al. 2025).
    E.g. `optimizer=muon optimizer.scale=original`."""

    qk_clip: PositiveFloat | None = None
    """Largest attention logit of a head (Kimi Team 2025): where one of the step is larger, the head's queries and keys
    are scaled down after the update, by its square root each. null leaves them.
    E.g. `optimizer=muon optimizer.qk_clip=100`."""

    @property
    def max_logit(self) -> float | None:
        """`qk_clip`."""
        return self.qk_clip

    def matrix_scale(self, rows: float, columns: float) -> float:
        """`scale` of a matrix; its orthogonalized update has norm 1."""
        match self.scale:
            case "match_rms_adamw":
                return 0.2 * max(rows, columns) ** 0.5
            case "original":
                return max(1.0, rows / columns) ** 0.5
            case "none":
                return 1.0

    @property
    def is_scale_invariant(self) -> bool:
        """True: updates are orthogonalized; but a head is no matrix that grows with the width."""
        return self.split_attention != "head"

    @property
    def max_state(self) -> float | None:
        """AdamW's moments; a matrix has a momentum only."""
        return 2


def build(parameters: Sequence["NamedParameter"], config: Config) -> "torch.optim.Optimizer":
    """Build Muon."""
    from titan_exp.optim.updates.muon import Muon

    return Muon(parameters, config)
