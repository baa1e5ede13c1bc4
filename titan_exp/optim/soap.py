"""SOAP (Vyas et al. 2024): Adam in the eigenbasis of Shampoo's preconditioner for matrices, AdamW for the rest."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from titan_exp.config.groups.optimizer import Betas, SplitMatrixOptimizerConfig
from titan_exp.config.groups.types import PositiveFloat, PositiveInt

if TYPE_CHECKING:
    import torch

    from titan_exp.optim.parameter_groups import NamedParameter


@dataclass(frozen=True, kw_only=True)
class Config(SplitMatrixOptimizerConfig):
    """Fields of SOAP."""

    betas: Betas
    """Decay rates of the first moment, and of the second and the covariances; AdamW's for the rest.
    E.g. `optimizer.betas='[0.9,0.99]'`."""
    eps: PositiveFloat
    """Added to the denominator. E.g. `optimizer.eps=1e-15`."""
    precondition_every: PositiveInt
    """Steps between power iterations of the eigenbases. E.g. `optimizer=soap optimizer.precondition_every=1`."""
    max_dim: PositiveInt
    """Largest side of a matrix with a covariance and an eigenbasis; a larger side is not rotated.
    E.g. `optimizer=soap optimizer.max_dim=4096`."""
    sides: Literal["both", "smaller"]
    """Rotated sides of a matrix: both, or the smaller one alone, with less memory and work.
    E.g. `optimizer=soap optimizer.sides=smaller`."""

    @property
    def max_state(self) -> float | None:
        """Two moments, and two numbers per element of a side's covariance."""
        return 4 if self.sides == "smaller" else 4 + 2 * self.max_dim

    @property
    def costliest(self) -> "Config":
        """A power iteration in every step."""
        return replace(self, precondition_every=1)


def build(parameters: Sequence["NamedParameter"], config: Config) -> "torch.optim.Optimizer":
    """Build SOAP."""
    from titan_exp.optim.updates.soap import Soap

    return Soap(parameters, config)
