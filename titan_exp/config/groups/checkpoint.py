"""Group `checkpoint`: when state is saved, what is kept, and what a new run begins with."""

from dataclasses import dataclass, field
from typing import Literal

from titan_exp.config.groups.types import PositiveFloat, PositiveInt


@dataclass(frozen=True)
class CheckpointConfig:
    """Distributed checkpoints of the whole training state."""

    mode: Literal["async", "async_pinned", "async_process", "sync", "off"]
    """`async` pauses training only to copy the state and writes in the background: `async_pinned` from pinned memory
    that is kept (CUDA), `async_process` in a process of its own (through /dev/shm). `off` saves none."""
    every: PositiveInt | None
    """Steps between checkpoints; null counts none. The last step and a stop request are always saved."""
    every_minutes: PositiveFloat | None
    """Minutes between checkpoints on rank 0's clock, whichever comes first; null looks at no clock."""
    keep: PositiveInt
    """Newest complete checkpoints kept; an older one goes only after a newer one is durable."""
    keep_every: PositiveInt | None
    """Checkpoints whose step is a multiple of it are kept for ever, besides the newest; null keeps none of them."""
    last: Literal["full", "weights"]
    """What is saved after the last step; from `weights` alone no run can be continued, only begun."""
    remote: str | None
    """URL under which every complete checkpoint is kept as well (`s3://bucket/prefix`, `gs://…`, `file:///mnt/share`),
    in `<experiment.name>/<run id>/step-…`, and from which a run without its folder continues; null keeps none. No
    credential in it: those come from the environment."""
    remote_wait_minutes: PositiveFloat
    """Minutes that a finished run waits for uploads that are on their way; at most one of them after a stop request."""
    export: Literal["none", "bf16", "fp32"]
    """Type of the weights that are exported after the last step, as a Hugging Face folder in the run's `export/`, by
    all ranks at once; `none` exports nothing."""
    export_every: PositiveInt | None
    """Steps between further exports, for which training stands still; null exports after the last step alone."""
    initial: str | None = None
    """Run folder, checkpoint or Hugging Face folder whose weights a new run begins with, made in any layout, or its
    URL; part of what is computed."""
    initial_exclude: list[str] = field(default_factory=list)
    """Patterns of full names (`head.*`) of weights that keep their initial values nevertheless."""
