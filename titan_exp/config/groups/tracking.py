"""Groups `tracking` and `profiling`: metric sinks and profiler traces. Neither affects the result."""

from dataclasses import dataclass
from typing import Literal

from titan_exp.config.groups.types import Count, PositiveInt


@dataclass(frozen=True)
class TrackingConfig:
    """Metric sinks. `metrics.jsonl` is always written and complete; the others are best-effort copies."""

    log_every: PositiveInt
    """Steps between rows of metrics."""
    images_every: Count
    """Steps between grids of images that a diffusion model draws, for the captions of 8 samples of training and 8 held
    out, in the run's `images/`, TensorBoard and W&B; 0 never."""
    tensorboard: bool
    """Also log to TensorBoard files in the run folder."""
    wandb: bool
    """Also log to Weights & Biases."""
    wandb_mode: Literal["auto", "online", "offline"]
    """`auto` is online if this machine is logged in, else offline."""
    wandb_project: str
    """W&B project."""
    wandb_entity: str | None
    """W&B team or user; null is the account's default."""


@dataclass(frozen=True)
class ProfilingConfig:
    """A torch profiler window and a memory breakdown, written to `traces/`."""

    enabled: bool
    """Record a trace on every rank."""
    start: Count
    """Step after which recording starts."""
    steps: PositiveInt
    """Steps recorded."""
    memory_step: PositiveInt | None = None
    """Step after whose optimizer update every rank writes a memory breakdown, including the peak of that step; null
    never. On CUDA with a snapshot for torch's viewer and allocation stacks, which slow the steps before it a little."""
