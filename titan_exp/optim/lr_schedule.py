"""Learning-rate schedule: linear warmup, constant peak, decay to a floor.

A pure function of the step: it has no state to checkpoint, and a changed configuration takes effect on resume.
"""

import math
from collections.abc import Callable

import torch

from titan_exp.config.groups.optimizer import LRScheduleConfig
from titan_exp.config.schema.call_signature import Call, import_callable
from titan_exp.config.schema.import_path import is_dotted
from titan_exp.config.secrets.variables import revealed

DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "sqrt": lambda progress: 1 - math.sqrt(progress),
}
"""Factor between floor (0) and peak (1) by progress through the decay, from 0 to 1 (sqrt: Hägele et al. 2024)."""


class LRSchedule:
    """Learning rate of steps 1 to `steps`; `peak` between warmup and decay."""

    def __init__(self, config: LRScheduleConfig, *, peak: float, steps: int) -> None:
        self.config, self.peak, self.steps = config, peak, steps
        self._decay = _decay(config)

    def __call__(self, step: int) -> float:
        """Learning rate of a step, counted from 1. Peak at `warmup_steps` exactly; the floor would be that of the step
        after the last, so that every step trains."""
        config = self.config
        if step < config.warmup_steps:
            return self.peak * step / config.warmup_steps
        into_decay = step - (self.steps - config.decay_steps)
        if config.decay_steps == 0 or into_decay <= 0:
            return self.peak
        factor = self._decay(min(1.0, into_decay / (config.decay_steps + 1)))
        return self.peak * (config.min_lr_ratio + (1 - config.min_lr_ratio) * factor)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group, times the group's `lr_scale` if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def _decay(config: LRScheduleConfig) -> Callable[[float], float]:
    if not is_dotted(config.decay):
        return DECAYS[config.decay]
    call = Call(("progress",), (), "lr_schedule.options", config.options)
    function = import_callable(config.decay, "lr_schedule.decay", call)
    options = revealed(config.options, "lr_schedule.options")
    return lambda progress: float(function(progress, **options))
