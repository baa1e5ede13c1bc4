"""Group `plan`: memory prediction before every launch. It does not change what is computed."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PlanConfig:
    """Memory prediction before a run is started."""

    gate: Literal["refuse", "warn", "off"] = "refuse"
    """Action if the predicted peak exceeds the device's memory: `refuse` does not start the run, `warn` starts it with
    a warning, `off` predicts nothing."""
    predict: Literal["needed", "always"] = "needed"
    """`needed` skips runs that fit by an upper bound (small models); `always` predicts them too, to compare prediction
    and measurement. Predictions are cached."""
