"""The learning rate as a pure function of the step: linear warm-up, a stable peak, decay to a floor.

Having no state, it needs no place in a checkpoint, and a changed configuration takes effect on resume.
"""

import math
from collections.abc import Callable

from titan_exp.config.groups.optimizer import LRScheduleConfig
from titan_exp.config.schema.import_path import import_dotted, is_dotted

DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "sqrt": lambda progress: 1 - math.sqrt(progress),
}
"""Factor between floor (0) and peak (1) by progress through the decay, from 0 to 1 (sqrt: Hägele et al. 2024)."""


class LRSchedule:
    """Learning rate of step 1, 2, … steps.

    Args:
        config: lengths and shape.
        peak: learning rate between warm-up and decay.
        steps: steps of the run.
    """

    def __init__(self, config: LRScheduleConfig, *, peak: float, steps: int) -> None:
        self.config, self.peak, self.steps = config, peak, steps
        self._decay = _decay(config)

    def __call__(self, step: int) -> float:
        """Rate of a step, counted from 1. The peak is reached exactly at `warmup_steps`, the floor at the last step."""
        config = self.config
        if step < config.warmup_steps:
            return self.peak * step / config.warmup_steps
        into_decay = step - (self.steps - config.decay_steps)
        if config.decay_steps == 0 or into_decay <= 0:
            return self.peak
        factor = self._decay(min(1.0, into_decay / config.decay_steps))
        return self.peak * (config.min_lr_ratio + (1 - config.min_lr_ratio) * factor)


def _decay(config: LRScheduleConfig) -> Callable[[float], float]:
    if not is_dotted(config.decay):
        return DECAYS[config.decay]
    function = import_dotted(config.decay, "lr_schedule.decay")
    return lambda progress: float(function(progress, **config.options))
