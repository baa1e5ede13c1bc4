"""Group `grad_clip`: gradient clipping beside `training.max_grad_norm`."""

from dataclasses import dataclass
from typing import Literal

from titan_exp.config.groups.types import Count, PositiveFloat, Share


@dataclass(frozen=True)
class GradClipConfig:
    """Clipping of gradients, whose global norm `training.max_grad_norm` limits."""

    mode: Literal["norm", "value", "adagc"] = "norm"
    """Clipping: `norm` limits the global norm alone, `value` clamps every number of a gradient before that, `adagc`
    (Wang et al. 2025) limits the norm of each parameter's gradient.

    `adagc` scales a gradient down to a multiple of the average of its own earlier norms, and limits the global norm in
    its warm-up only. E.g. `grad_clip.mode=adagc`."""
    max_value: PositiveFloat = 0.01
    """Mode `value`: largest magnitude of a gradient's number. E.g. `grad_clip=value grad_clip.max_value=1e-3`."""
    relative: PositiveFloat = 1.05
    """Mode `adagc`: largest norm of a parameter's gradient, in multiples of its average.
    E.g. `grad_clip=adagc grad_clip.relative=1.2`."""
    decay: Share = 0.98
    """Mode `adagc`: factor of the average norm at every step. E.g. `grad_clip=adagc grad_clip.decay=0.99`."""
    warmup_steps: Count = 100
    """Mode `adagc`: first steps, which are clipped by the global norm; the average is their smallest norm.
    E.g. `grad_clip=adagc grad_clip.warmup_steps=200`."""
