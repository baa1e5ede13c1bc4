"""Decays of the learning rate."""


def exponential(progress: float, floor: float = 0.01) -> float:
    """Factor of the peak, from 1 at progress 0 to `floor` at progress 1; `floor` is from `lr_schedule.options`."""
    return floor**progress
