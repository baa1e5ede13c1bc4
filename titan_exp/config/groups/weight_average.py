"""Group `weight_average`: an average of the weights over steps, beside the weights."""

from dataclasses import dataclass
from typing import Literal

from titan_exp.config.groups.types import PositiveInt, Share


@dataclass(frozen=True)
class WeightAverageConfig:
    """Average of the weights after each step, with an evaluation of its own. It changes no training step."""

    mode: Literal["none", "ema", "tail"] = "none"
    """Average of the weights over steps, beside them: `none`, `ema`, an exponential moving average without bias towards
    the initial weights, or `tail`, the mean over the last `steps` steps.

    Evaluations log `averaged/validation_loss`; `convert`, `evaluate` and `generate` take the average of a checkpoint
    with `--averaged`. It takes 4 bytes per parameter, sharded like the weights. E.g. `weight_average.mode=ema`."""
    decay: Share = 0.999
    """Mode `ema`: factor of the average at every step. E.g. `weight_average=ema weight_average.decay=0.9999`."""
    steps: PositiveInt = 100
    """Mode `tail`: number of last steps of `training.steps` that are averaged.

    A run that stops earlier (`training.stop_after`) averages those that it has of them, and a run that continues it the
    others. E.g. `weight_average=tail weight_average.steps=500`."""

    @property
    def enabled(self) -> bool:
        """True if there is an average."""
        return self.mode != "none"

    def first_step(self, steps: int) -> int:
        """First averaged step of a whole run of `steps` steps."""
        return max(1, steps - self.steps + 1) if self.mode == "tail" else 1
