"""Groups `tracking` and `profiling`: metric sinks and profiler traces. Neither affects the result."""

from dataclasses import dataclass, field
from typing import Literal

from titan_exp.config.extension import extended
from titan_exp.config.groups.types import Count, PositiveInt


@extended("tracking")
@dataclass(frozen=True)
class TrackingConfig:
    """Metric sinks. `metrics.jsonl` is always written and complete; the others are best-effort copies."""

    log_every: PositiveInt
    """Steps between rows of metrics. E.g. `tracking.log_every=1`."""
    tensorboard: bool
    """Also log to TensorBoard files in the run folder. E.g. `tracking.tensorboard=true`."""
    wandb: bool
    """Also log to Weights & Biases. E.g. `tracking.wandb=true`."""
    wandb_mode: Literal["auto", "online", "offline"]
    """`auto` is online if this machine is logged in, else offline. E.g. `tracking.wandb_mode=offline`."""
    wandb_project: str
    """W&B project. E.g. `tracking.wandb_project=ablations`."""
    wandb_entity: str | None
    """W&B team or user; null is the account's default. E.g. `tracking.wandb_entity=my-team`."""
    metrics: list[str] = field(default_factory=list)
    """Metrics of modules that join the rows: `max_logit` (the largest attention logit) and other files of
    `titan_exp/trainer/module_metrics`, or import paths of your own classes. They change no result.
    E.g. `tracking.metrics=[max_logit]`."""


@dataclass(frozen=True)
class ProfilingConfig:
    """A torch profiler window and a memory breakdown, written to `traces/`."""

    enabled: bool
    """Record a torch profiler trace on every rank, into `traces/`. E.g. `profiling.enabled=true`."""
    start: Count
    """Step after which recording starts. E.g. `profiling.start=20`."""
    steps: PositiveInt
    """Steps recorded. E.g. `profiling.steps=5`."""
    memory_step: PositiveInt | None = None
    """Step after whose optimizer update every rank writes a memory breakdown, including the peak of that step; null
    never.

    On CUDA with a snapshot for torch's viewer and allocation stacks, which slow the steps before it a little.
    E.g. `profiling.memory_step=5`."""
