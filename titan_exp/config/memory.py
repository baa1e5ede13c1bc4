"""Groups that trade time, memory and precision: `quantization`, `activation_checkpoint`, `compile`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class QuantizationConfig:
    """Low-precision matmuls."""

    recipe: Literal["none"]
    """`none` multiplies in the type of `training.mixed_precision`."""


@dataclass(frozen=True)
class ActivationCheckpointConfig:
    """What backward recomputes instead of keeping."""

    mode: Literal["none", "full"]
    """`none` keeps every activation; `full` keeps each block's input and recomputes the rest."""


@dataclass(frozen=True)
class CompileConfig:
    """torch.compile, block by block."""

    enabled: bool
    """Compile each transformer block (they share one compiled graph)."""
    backend: str
    """torch.compile backend: `inductor`; `aot_eager` traces without generating code."""
