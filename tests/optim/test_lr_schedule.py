import itertools
import math
from dataclasses import replace

import numpy as np
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


def test_stable_then_decay_in_equal_steps_of_which_one_more_would_reach_the_floor():
    found = rates(WSD)
    assert set(found[9:80]) == {2.0}
    assert np.diff([2.0, *found[80:], 0.2]) == pytest.approx([-1.8 / 21] * 21)


@pytest.mark.parametrize(
    ("decay", "middle"),
    [
        *(("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - math.sqrt(0.5)), ("square", 0.75)),
        ("exponential", (0.1 - 0.01) / 0.99),
    ],
)
def test_shapes(decay, middle):
    found = rates(replace(WSD, decay=decay, decay_steps=19, min_lr_ratio=0.0))
    assert found[90] == pytest.approx(2 * middle)
    assert 0 < found[-1] < 0.2, "the last batch trains as well"
    assert all(late <= early for early, late in itertools.pairwise(found[9:]))


def test_no_warmup_and_no_decay_is_constant():
    assert set(rates(replace(WSD, warmup_steps=0, decay_steps=0))) == {2.0}


def test_a_decay_of_the_users_own():
    own = replace(WSD, decay="tests.optim.own_decay.power", decay_steps=19, options={"exponent": 2.0}, min_lr_ratio=0.0)
    assert rates(own)[90] == pytest.approx(2 * 0.25)


def test_a_power_of_the_step_is_the_same_in_a_run_of_any_length():
    root = replace(WSD, power=0.5, decay_steps=0)
    found = rates(root)
    assert found[9] == 2.0
    assert found[39] == pytest.approx(1.0)
    assert rates(root, steps=200)[:100] == found
    decayed = rates(replace(root, decay_steps=60))
    assert decayed[:40] == found[:40]
    assert decayed[40] == pytest.approx(0.1 + 0.9 * 60 / 61)
    assert decayed[99] > 0.1


def test_cycles_decay_and_begin_again_at_the_stable_rate():
    found = rates(replace(WSD, cycles=3, decay_steps=9))
    cycle = found[10:40]
    assert cycle[:21] == [2.0] * 21
    assert cycle[-1] == pytest.approx(0.2 + 1.8 / 10)
    assert found[40:70] == found[70:100] == cycle
    # Cycles of 44 and 45 steps, all of them decay.
    restarts = rates(replace(WSD, cycles=2, decay_steps=90), steps=99)
    assert [place for place in range(10, 99) if restarts[place] > restarts[place - 1]] == [54]
    assert restarts[54] == pytest.approx(0.2 + 1.8 * 45 / 46)
