"""Weight averages: their formulas, and the exchange with the weights."""

import pytest
import torch
from torch import Tensor

from titan_exp.config.groups.training import WeightAverageConfig
from titan_exp.optim.weight_average import AVERAGE, WeightAverage


class Run:
    """Steps of SGD on random gradients, with an average of its weights."""

    def __init__(self, config: WeightAverageConfig, steps: int, *, of: int = 7) -> None:
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(4, 3))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.5)
        self.average = WeightAverage(self.optimizer, config, steps=of)
        self.seen: list[Tensor] = []
        for step in range(1, steps + 1):
            self.step(step)

    def step(self, step: int) -> None:
        self.weight.grad = torch.randn(4, 3)
        self.optimizer.step()
        self.average.update(step)
        self.seen.append(self.weight.detach().double())

    @property
    def averaged(self) -> Tensor:
        return self.optimizer.state[self.weight][AVERAGE]


def test_ema_weights_steps_by_powers_of_the_decay():
    run = Run(WeightAverageConfig("ema", decay=0.8), 7)
    shares = torch.tensor([0.8 ** (6 - step) for step in range(7)], dtype=torch.float64)
    expected = (torch.stack(run.seen) * (shares / shares.sum()).view(-1, 1, 1)).sum(0)
    torch.testing.assert_close(run.averaged.double(), expected, atol=1e-6, rtol=0)


def test_tail_is_the_mean_over_the_last_steps():
    run = Run(WeightAverageConfig("tail", steps=3), 7)
    torch.testing.assert_close(run.averaged.double(), torch.stack(run.seen[4:]).mean(0), atol=1e-6, rtol=0)
    assert run.average.steps == 3


def test_tail_takes_no_memory_before_its_first_step():
    run = Run(WeightAverageConfig("tail", steps=3), 4)
    assert AVERAGE not in run.optimizer.state[run.weight]
    run.step(5)
    assert torch.equal(run.averaged, run.weight)


def test_the_average_is_in_use_and_the_weights_come_back_bitwise():
    run = Run(WeightAverageConfig("ema", decay=0.8), 4)
    weights, averaged, moved = run.weight.detach().clone(), run.averaged.clone(), list[bool]()
    run.average.after_move = lambda: moved.append(torch.equal(run.weight, averaged))
    with run.average.in_use():
        assert torch.equal(run.weight, averaged)
    assert torch.equal(run.weight, weights)
    assert torch.equal(run.averaged, averaged)
    assert moved == [True, False]


@pytest.mark.parametrize(
    ("saved", "step", "steps", "said"),
    [
        ({"mode": "tail", "steps": 2}, 6, 2, None),
        ({"mode": "tail", "steps": 2}, 4, 0, None),
        (
            {"mode": "tail", "steps": 3},
            6,
            0,
            "averages from step 7 on instead of from step 5, because the checkpoint of step 6 holds",
        ),
        ({"mode": "tail", "steps": 1}, 6, 1, "averages from step 6 on instead of from step 5"),
        ({"mode": "ema", "steps": 5}, 6, 0, "holds no mean"),
        (None, 6, 0, "holds no mean"),
        (None, 4, 0, None),
    ],
    ids=["the same", "an earlier tail", "begun before", "begun late", "another mode", "none", "none yet"],
)
def test_an_average_continues_if_it_is_the_same(saved: dict | None, step: int, steps: int, said: str | None):
    run = Run(WeightAverageConfig("tail", steps=3), 7)
    found = run.average.restore(saved, step)
    assert (said or "") in (found or "")
    assert (said is None) == (found is None)
    assert run.average.steps == steps
    assert (AVERAGE in run.optimizer.state[run.weight]) == bool(steps)
