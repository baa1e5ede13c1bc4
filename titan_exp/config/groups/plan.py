"""Group `plan`: memory prediction before every launch. It does not change what is computed."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from titan_exp.config.groups.types import PositiveFloat


@dataclass(frozen=True)
class PlanConfig:
    """Memory prediction before a run is started."""

    gate: Literal["refuse", "warn", "off"] = "refuse"
    """Action if the predicted peak exceeds the device's memory: `refuse` does not start the run, `warn` starts it with
    a warning, `off` predicts nothing. E.g. `plan.gate=warn`."""
    predict: Literal["needed", "always"] = "needed"
    """`needed` skips runs that fit by an upper bound (small models); `always` predicts them too, to compare prediction
    and measurement. Predictions are cached. E.g. `plan.predict=always`."""
    seconds: PositiveFloat = 300.0
    """Seconds that a launch waits for the prediction; a run that takes longer starts unchecked, with a warning.
    E.g. `plan.seconds=30`."""
    worst_expert_load: Annotated[float, Ge(1)] = 2.0
    """Load of a rank's experts, in multiples of the mean, for which `titan-exp plan` tells the memory beside that of
    uniform routing, with `parallelism.ep`; 1 leaves it out.

    Nothing bounds it: balance makes it rare. E.g. `plan.worst_expert_load=4`."""
