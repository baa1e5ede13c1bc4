import itertools
import math
from dataclasses import replace

import pytest

from titan_exp.config.groups.optimizer import LRScheduleConfig
from titan_exp.optim.lr_schedule import LRSchedule

WSD = LRScheduleConfig(warmup_steps=10, decay_steps=20, decay="linear", min_lr_ratio=0.1)


def rates(config: LRScheduleConfig, steps: int = 100) -> list[float]:
    schedule = LRSchedule(config, peak=2.0, steps=steps)
    return [schedule(step) for step in range(1, steps + 1)]


def test_warmup_starts_above_zero_and_reaches_the_peak_at_its_last_step():
    found = rates(WSD)
    assert found[0] == pytest.approx(0.2)
    assert found[8] < 2.0
    assert found[9] == 2.0


def test_stable_then_decay_to_the_floor_at_the_last_step():
    found = rates(WSD)
    assert set(found[9:80]) == {2.0}
    assert found[80] < 2.0
    assert found[-1] == pytest.approx(0.2)
    # The middle of the decay is the middle between peak and floor.
    assert found[89] == pytest.approx(1.1)


@pytest.mark.parametrize(("decay", "middle"), [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - math.sqrt(0.5))])
def test_shapes(decay, middle):
    found = rates(replace(WSD, decay=decay, min_lr_ratio=0.0))
    assert found[89] == pytest.approx(2 * middle)
    assert found[-1] == pytest.approx(0.0)
    assert all(late <= early for early, late in itertools.pairwise(found[9:]))


def test_no_warmup_and_no_decay_is_constant():
    assert set(rates(replace(WSD, warmup_steps=0, decay_steps=0))) == {2.0}


def test_a_decay_of_the_users_own():
    own = replace(WSD, decay="tests.optim.own_decay.power", options={"exponent": 2.0}, min_lr_ratio=0.0)
    assert rates(own)[89] == pytest.approx(2 * 0.25)
