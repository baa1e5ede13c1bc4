"""Group `plan`: the look at memory before every launch. It does not change what is computed."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PlanConfig:
    """Memory prediction before a run is started."""

    gate: Literal["refuse", "warn", "off"] = "refuse"
    """Action if the predicted peak exceeds the device's memory: `refuse` does not start the run, `warn` starts it with
    a warning, `off` predicts nothing."""
    predict: Literal["needed", "always"] = "needed"
    """`needed` leaves out what an upper bound, computed at once, shows to fit (small models); `always` predicts them
    too, so that prediction and measurement can be compared. Equal runs are predicted once and remembered."""
