"""Group `checkpoint`: save interval, retention, remote copies, initial weights and exports."""

from dataclasses import dataclass, field
from typing import Literal

from titan_exp.config.extension import extended
from titan_exp.config.groups.types import PositiveFloat, PositiveInt


@extended("checkpoint")
@dataclass(frozen=True)
class CheckpointConfig:
    """Distributed checkpoints of the whole training state."""

    mode: Literal["async", "async_pinned", "async_process", "sync", "off"]
    """Way of saving: `async` pauses training only to stage the state and writes in the background; `async_pinned`
    stages into pinned memory (CUDA), `async_process` writes in a separate process (through /dev/shm); `sync` pauses
    until the checkpoint is durable; `off` saves none, so that an interrupted run starts over.
    E.g. `checkpoint.mode=sync`."""
    every: PositiveInt | None
    """Steps between checkpoints; null for none. The last step and a stop request are always saved.
    E.g. `checkpoint.every=1000`."""
    every_minutes: PositiveFloat | None
    """Minutes between checkpoints on rank 0's clock, whichever comes first; null for none.
    E.g. `checkpoint.every_minutes=30`."""
    keep: PositiveInt
    """Number of newest complete checkpoints kept; an older one is deleted only after a newer one is durable.
    E.g. `checkpoint.keep=5`."""
    keep_every: PositiveInt | None
    """Checkpoints whose step is a multiple of it are kept forever, besides the newest; null keeps none of them.
    E.g. `checkpoint.keep_every=10000`."""
    fail_after_minutes: PositiveFloat | None
    """Minutes without a complete checkpoint, while saves fail (full or read-only disk), after which the run fails; a
    last save is tried then. Null trains on with a warning in `status` and in the progress display, as is the default:
    the disk may recover. E.g. `checkpoint.fail_after_minutes=60`."""
    last: Literal["full", "weights"]
    """Content of the last checkpoint: `full`, or `weights`, a third of the size, from which a run can be started, but
    not resumed. E.g. `checkpoint.last=weights`."""
    remote: str | None
    """URL to which every complete checkpoint is uploaded (`s3://bucket/prefix`, `gs://…`, `file:///mnt/share`), as
    `<experiment.name>/<run id>/step-…`, and from which a run without its folder resumes; null uploads none. It must
    hold no credential: those come from the environment. E.g. `checkpoint.remote=s3://bucket/runs`."""
    remote_wait_minutes: PositiveFloat
    """Minutes a finished run waits for uploads; at most one after a stop request.
    E.g. `checkpoint.remote_wait_minutes=30`."""
    export: Literal["none", "bf16", "fp32"]
    """Dtype of the weights exported after the last step, as a Hugging Face folder in the run's `export/`, by all ranks
    in parallel; `none` exports nothing. E.g. `checkpoint.export=bf16`."""
    export_every: PositiveInt | None
    """Steps between further exports, during which training pauses; null exports only after the last step.
    E.g. `checkpoint.export_every=10000`."""
    initial: str | None = None
    """Run folder, checkpoint or Hugging Face folder, or its URL, whose weights a new run starts from, saved in any
    layout; null initializes them. Part of the run's identity. E.g. `checkpoint.initial=runs/first/6c43198cf79b`."""
    initial_exclude: list[str] = field(default_factory=list)
    """Patterns of full names (`head.*`) of weights that are initialized nevertheless.
    E.g. `checkpoint.initial_exclude='[head.*]'`."""
    accept_changes: list[str] = field(default_factory=list)
    """Keys of the model, or `data.tokenizer`, that may differ from those of the weights that a run begins with, though
    the same weights then compute something else. E.g. `checkpoint.accept_changes='[data.tokenizer]'`."""
    continue_from: str | None = None
    """Run whose whole state (weights, optimizer, data position, counters) a new run begins with: its folder, name or
    id, one of its checkpoints, or its URL. `auto` takes the run of the same name that differs in layout, steps and
    schedule alone; null begins anew.

    Model, optimizer, data and seed must be the same; layout, steps, schedule, batch size and all else may differ. Of
    several runs, `auto` takes the one with the most steps, and none if there is none. Part of the run's identity.
    E.g. `checkpoint.continue_from=first/6c43198cf79b`."""
    continue_step: PositiveInt | None = None
    """Step of that run's checkpoint; null is the newest at the first start.
    E.g. `checkpoint.continue_from=first/6c43198cf79b checkpoint.continue_step=800`."""
    continue_data: Literal["same", "restart"] = "same"
    """Data of a continued run: `same` reads on where that run stopped; `restart` reads from the beginning, also of
    other data. E.g. `checkpoint.continue_from=first/6c43198cf79b checkpoint.continue_data=restart`."""
