"""Learning-rate schedule: linear warmup, a stable phase, decay to a floor; once or in cycles. It is a pure function of
the step, so it has no state to checkpoint, and a changed configuration takes effect on resume."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

from titan_exp.config.groups.optimizer import LRScheduleConfig
from titan_exp.config.schema.component import Call, import_callable, is_dotted
from titan_exp.config.secrets import revealed

if TYPE_CHECKING:
    import torch


class Decays:
    """Factors between floor (0) and the rate before the decay (1) by progress through it, from 0 to 1. A function here
    is a value of `lr_schedule.decay`, and its docstring the value's meaning in the reference."""

    @staticmethod
    def linear(progress: float) -> float:
        """Straight line."""
        return 1 - progress

    @staticmethod
    def cosine(progress: float) -> float:
        """Half a period of the cosine (Loshchilov and Hutter 2017)."""
        return 0.5 * (1 + math.cos(math.pi * progress))

    @staticmethod
    def sqrt(progress: float) -> float:
        """1 - sqrt(progress) (Hägele et al. 2024)."""
        return 1 - math.sqrt(progress)

    @staticmethod
    def square(progress: float) -> float:
        """1 - progress² (Hägele et al. 2024)."""
        return 1 - progress**2

    @staticmethod
    def exponential(progress: float) -> float:
        """Exponential by a factor of 100, shifted to end at the floor (Hu et al. 2024)."""
        return (0.01**progress - 0.01) / 0.99


class LRSchedule:
    """Learning rate of steps 1 to `steps`. Between warmup and decay it is `peak`, or a power of the step."""

    def __init__(self, config: LRScheduleConfig, *, peak: float, steps: int) -> None:
        self.config, self.peak, self.steps = config, peak, steps
        self._decay = _decay(config)

    def __call__(self, step: int) -> float:
        """Learning rate of a step, counted from 1, with its peak at `warmup_steps`. The floor follows the last step."""
        config, left = self.config, self.steps - self.config.warmup_steps
        if step < config.warmup_steps:
            return self.peak * step / config.warmup_steps
        # Decay steps in the cycle of this step, and the last step before they begin.
        ends = [config.warmup_steps + left * number // config.cycles for number in range(config.cycles + 1)]
        begin, end = next((pair for pair in pairwise(ends) if step <= pair[1]), (ends[-2], ends[-1]))
        decay = min(config.decay_steps, end - begin)
        before_decay = end - decay
        if decay == 0 or step <= before_decay:
            return self._stable(step)
        factor = self._decay(min(1.0, (step - before_decay) / (decay + 1)))
        return self._stable(before_decay) * (config.min_lr_ratio + (1 - config.min_lr_ratio) * factor)

    def _stable(self, step: int) -> float:
        """Rate of the stable phase: peak · (warmup / step)^power."""
        first = max(1, self.config.warmup_steps)
        return self.peak * (first / max(step, first)) ** self.config.power


def set_lr(optimizer: "torch.optim.Optimizer", lr: float) -> None:
    """Set the learning rate of every parameter group; a group's `lr_scale`, if any, multiplies it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def _decay(config: LRScheduleConfig) -> Callable[[float], float]:
    if not is_dotted(config.decay):
        return getattr(Decays, config.decay)
    call = Call(("progress",), (), "lr_schedule.options", config.options)
    function = import_callable(config.decay, "lr_schedule.decay", call)
    options = revealed(config.options, "lr_schedule.options")
    return lambda progress: float(function(progress, **options))
