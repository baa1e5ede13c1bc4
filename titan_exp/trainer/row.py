"""Result of a step, and the row that tells of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Numbers = Mapping[str, float | int | None]
"""Numbers of a row by name."""


@dataclass(frozen=True)
class StepResult:
    """Result of a step, still on the device: reading a tensor synchronizes."""

    metrics: Mapping[str, Tensor]
    """This rank's share of the mean `loss` and of the objective's metrics, before reduction over ranks."""
    grad_norm: Tensor
    """Global gradient norm before clipping."""
    tokens: int
    """Predicted tokens of the global batch."""
    clipping: Mapping[str, Tensor] = field(default_factory=dict)
    """Metrics of clipping, the same on every rank."""


@dataclass
class Row:
    """Numbers of one step."""

    values: dict[str, float]
    """Reduced metrics of the step, the same on every rank: `loss`, `grad_norm`, those of modules and experts."""
    row: dict[str, Any] | None
    """The whole row, on the first rank; None on others."""
