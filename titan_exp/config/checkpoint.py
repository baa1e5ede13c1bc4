"""Group `checkpoint`: when state is saved, and what is kept."""

from dataclasses import dataclass
from typing import Literal

from titan_exp.config.bounds import PositiveInt


@dataclass(frozen=True)
class CheckpointConfig:
    """Distributed checkpoints of the whole training state."""

    mode: Literal["async", "sync", "off"]
    """`async` pauses training only to copy the state and writes in the background; `off` saves nothing."""
    every: PositiveInt
    """Steps between checkpoints; the last step and a stop request are always saved."""
    keep: PositiveInt
    """Newest complete checkpoints kept; an older one goes only after a newer one is durable."""
