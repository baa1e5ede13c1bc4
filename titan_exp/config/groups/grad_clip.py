"""Group `grad_clip`: gradient clipping beside `training.max_grad_norm`."""

from dataclasses import dataclass
from typing import Literal

from titan_exp.config.groups.types import Count, PositiveFloat, Share


@dataclass(frozen=True)
class GradClipConfig:
    """Clipping of gradients, whose global norm `training.max_grad_norm` limits."""

    mode: Literal["norm", "value", "adagc"] = "norm"
    """`norm` limits the global norm alone. `value` clamps every number of a gradient before that. `adagc` (Wang et al.
    2025) scales each parameter's gradient down to a multiple of the average of its own earlier norms, and limits the
    global norm in its warm-up only."""
    max_value: PositiveFloat = 0.01
    """Mode `value`: largest magnitude of a gradient's number."""
    relative: PositiveFloat = 1.05
    """Mode `adagc`: largest norm of a parameter's gradient, in multiples of its average."""
    decay: Share = 0.98
    """Mode `adagc`: factor of the average norm at every step."""
    warmup_steps: Count = 100
    """Mode `adagc`: first steps, which are clipped by the global norm; the average is their smallest norm."""
