"""Dion (Ahn et al. 2025): momentum orthonormalized in a low rank, with error feedback and small messages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Interval

from titan_exp.config.groups.optimizer import MatrixOptimizerConfig

if TYPE_CHECKING:
    import torch

    from titan_exp.optim.parameter_groups import NamedParameter


@dataclass(frozen=True, kw_only=True)
class Config(MatrixOptimizerConfig):
    """Fields of Dion; a fused projection is one matrix."""

    momentum: Annotated[float, Interval(ge=0, lt=1)]
    """Share of the orthonormalized part that stays in the momentum; the rest of it stays whole (error feedback).
    E.g. `optimizer=dion optimizer.momentum=0.9`."""
    rank_fraction: Annotated[float, Interval(gt=0, le=1)]
    """Rank of the update, as a fraction of the smaller side of a matrix.
    E.g. `optimizer=dion optimizer.rank_fraction=0.5`."""
    scale: Literal["match_rms_adamw", "original", "none"]
    """Factor of the learning rate of a matrix: `match_rms_adamw` is 0.2 · sqrt(max(rows, columns)), `original` is
    sqrt(rows / columns). E.g. `optimizer=dion optimizer.scale=original`."""

    def matrix_scale(self, rows: float, columns: float) -> float:
        """`scale` of a matrix; its orthogonalized update has norm 1."""
        match self.scale:
            case "match_rms_adamw":
                return 0.2 * max(rows, columns) ** 0.5
            case "original":
                return (rows / columns) ** 0.5
            case "none":
                return 1.0

    @property
    def is_scale_invariant(self) -> bool:
        """True: updates are orthonormalized."""
        return True

    @property
    def max_state(self) -> float | None:
        """The momentum, and at most as many numbers of the right factor."""
        return 2


def build(parameters: Sequence["NamedParameter"], config: Config) -> "torch.optim.Optimizer":
    """Build Dion."""
    from titan_exp.optim.updates.dion import Dion

    return Dion(parameters, config)
