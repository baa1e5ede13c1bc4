"""Decays of the learning rate: functions from progress, 0 to 1, to a factor between former rate (1) and floor (0).

A function here is a value of `lr_schedule.decay`, and its docstring the value's meaning in the reference.
"""

import math


def linear(progress: float) -> float:
    """Straight line."""
    return 1 - progress


def cosine(progress: float) -> float:
    """Half a period of the cosine (Loshchilov and Hutter 2017)."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def sqrt(progress: float) -> float:
    """1 - sqrt(progress) (Hägele et al. 2024)."""
    return 1 - math.sqrt(progress)


def square(progress: float) -> float:
    """1 - progress² (Hägele et al. 2024)."""
    return 1 - progress**2


def exponential(progress: float) -> float:
    """Exponential by a factor of 100, shifted to end at the floor (Hu et al. 2024)."""
    return (0.01**progress - 0.01) / 0.99
