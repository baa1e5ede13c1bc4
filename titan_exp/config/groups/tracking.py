"""Groups `tracking` and `profiling`: where numbers and traces go. Neither changes what is computed."""

from dataclasses import dataclass
from typing import Literal

from titan_exp.config.groups.types import Count, PositiveInt


@dataclass(frozen=True)
class TrackingConfig:
    """`metrics.jsonl` is always written and is the truth; the others mirror it."""

    log_every: PositiveInt
    """Steps between rows of metrics."""
    tensorboard: bool
    """Mirror to TensorBoard files in the run folder."""
    wandb: bool
    """Mirror to Weights & Biases."""
    wandb_mode: Literal["auto", "online", "offline"]
    """`auto` is online where this machine is logged in and offline elsewhere."""
    wandb_project: str
    """Project that runs are listed under."""
    wandb_entity: str | None
    """Team or user; null is the account's default."""


@dataclass(frozen=True)
class ProfilingConfig:
    """A torch profiler window and a look at memory, written to `traces/`."""

    enabled: bool
    """Record a trace on every rank."""
    start: Count
    """Step after which recording starts."""
    steps: PositiveInt
    """Steps recorded."""
    memory_step: PositiveInt | None = None
    """Step after whose optimizer update every rank writes down what its memory holds, the peak of that step included;
    null never. On CUDA with a snapshot for torch's viewer, and where each block was allocated, which makes steps up to
    that one a little slower."""
