"""Group `checkpoint`: save interval, retention, remote copies, initial weights and exports."""

from dataclasses import dataclass, field
from typing import Literal

from titan_exp.config.groups.types import PositiveFloat, PositiveInt


@dataclass(frozen=True)
class CheckpointConfig:
    """Distributed checkpoints of the whole training state."""

    mode: Literal["async", "async_pinned", "async_process", "sync", "off"]
    """`async` pauses training only to stage the state and writes in the background; `async_pinned` stages into pinned
    memory (CUDA), `async_process` writes in a separate process (through /dev/shm). `off` saves none."""
    every: PositiveInt | None
    """Steps between checkpoints; null for none. The last step and a stop request are always saved."""
    every_minutes: PositiveFloat | None
    """Minutes between checkpoints on rank 0's clock, whichever comes first; null for none."""
    keep: PositiveInt
    """Number of newest complete checkpoints kept; an older one is deleted only after a newer one is durable."""
    keep_every: PositiveInt | None
    """Checkpoints whose step is a multiple of it are kept forever, besides the newest; null keeps none of them."""
    fail_after_minutes: PositiveFloat | None
    """Minutes without a complete checkpoint, while saves fail (full or read-only disk), after which the run fails; a
    last save is tried then. Null trains on with a warning in `status` and in the progress display, as is the
    default: the disk may recover."""
    last: Literal["full", "weights"]
    """Content of the last checkpoint; from `weights` a run can be started, but not resumed."""
    remote: str | None
    """URL to which every complete checkpoint is uploaded (`s3://bucket/prefix`, `gs://…`, `file:///mnt/share`), as
    `<experiment.name>/<run id>/step-…`, and from which a run without its folder resumes; null uploads none. It must
    hold no credential: those come from the environment."""
    remote_wait_minutes: PositiveFloat
    """Minutes a finished run waits for uploads; at most one after a stop request."""
    export: Literal["none", "bf16", "fp32"]
    """Dtype of the weights exported after the last step, as a Hugging Face folder in the run's `export/`, by all ranks
    in parallel; `none` exports nothing."""
    export_every: PositiveInt | None
    """Steps between further exports, during which training pauses; null exports only after the last step."""
    initial: str | None = None
    """Run folder, checkpoint or Hugging Face folder, or its URL, whose weights a new run starts from; saved in any
    layout; part of the run's identity."""
    initial_exclude: list[str] = field(default_factory=list)
    """Patterns of full names (`head.*`) of weights that are initialized nevertheless."""
    accept_changes: list[str] = field(default_factory=list)
    """Keys of the model, or `data.tokenizer`, that may differ from those of the weights that a run begins with, though
    the same weights then compute something else."""
    continue_from: str | None = None
    """Run whose whole state (weights, optimizer, data position, counters) a new run begins with: its folder, name or
    id, one of its checkpoints, or its URL. Model, optimizer, data and seed must be the same; layout, steps, schedule,
    batch size and all else may differ. `auto` takes the run of the same name that differs in layout,
    steps and schedule alone and has the most steps, if there is one. Part of the run's identity."""
    continue_step: PositiveInt | None = None
    """Step of that run's checkpoint; null is the newest at the first start."""
    continue_data: Literal["same", "restart"] = "same"
    """`same` reads on where that run stopped; `restart` reads from the beginning, also of other data."""
