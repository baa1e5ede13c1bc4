"""Group `plan`: the look at memory before every launch. It does not change what is computed."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PlanConfig:
    """What is predicted before a run is started, and what follows from it."""

    gate: Literal["refuse", "warn", "off"] = "refuse"
    """What becomes of a run whose predicted peak of memory is more than its device has: `refuse` does not start it,
    `warn` says so and starts it, `off` predicts nothing."""
    predict: Literal["needed", "always"] = "needed"
    """`needed` leaves out what an upper bound, computed at once, shows to fit (small models); `always` predicts them
    too, so that prediction and measurement can be compared. Equal runs are predicted once and remembered."""
