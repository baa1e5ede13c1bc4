"""Outer optimizer: torch's SGD on the weights of the last synchronization, and state that loading and saving see."""

import pytest
import torch
from torch import nn

from titan_exp.extensions.replica_groups.config import SemiSyncConfig
from titan_exp.extensions.replica_groups.outer_optimizer import KEPT, MOMENTUM, OuterOptimizer

CONFIGS = [
    SemiSyncConfig("diloco"),
    SemiSyncConfig("diloco", outer_nesterov=False, outer_lr=0.3),
    SemiSyncConfig("diloco", outer_momentum=0.0),
    SemiSyncConfig("local_sgd"),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_steps_are_those_of_torch(config):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 4))
    inner = torch.optim.AdamW([weight], lr=0.1)
    outer = OuterOptimizer(inner, config)
    kept = weight.detach().double().requires_grad_()
    lr, momentum, nesterov = config.outer
    expected = torch.optim.SGD([kept], lr=lr, momentum=momentum, nesterov=nesterov)
    for _ in range(3):
        for _ in range(2):
            weight.grad = torch.randn(3, 4)
            outer.before_inner_step()
            inner.step()
            outer.after_inner_step()
        other = weight.detach() + torch.randn(3, 4)
        kept.grad = kept.detach() - (weight.detach() + other).double() / 2
        expected.step()
        (gradient,) = outer.pseudo_gradients()
        outer.step([gradient / 2 + (inner.state[weight][KEPT] - other) / 2])
        torch.testing.assert_close(weight.double(), kept.detach(), atol=1e-6, rtol=1e-6)
    assert (MOMENTUM in inner.state[weight]) == bool(momentum)


def test_local_sgd_is_the_average():
    weight = nn.Parameter(torch.randn(5))
    inner = torch.optim.SGD([weight], lr=0.1)
    outer = OuterOptimizer(inner, SemiSyncConfig("local_sgd"))
    weight.grad = torch.randn(5)
    outer.before_inner_step()
    inner.step()
    outer.after_inner_step()
    mine, other = weight.detach().clone(), torch.randn(5)
    (gradient,) = outer.pseudo_gradients()
    outer.step([(gradient + inner.state[weight][KEPT] - other) / 2])
    torch.testing.assert_close(weight.detach(), (mine + other) / 2)


def test_weights_are_kept_from_before_the_first_step():
    weight = nn.Parameter(torch.randn(5))
    first = weight.detach().clone()
    inner = torch.optim.AdamW([weight], lr=0.1)  # which allocates its state if there is none
    outer = OuterOptimizer(inner, SemiSyncConfig("diloco"))
    for _ in range(2):
        weight.grad = torch.randn(5)
        outer.before_inner_step()
        inner.step()
        outer.after_inner_step()
    assert {"exp_avg", "exp_avg_sq", KEPT, MOMENTUM} <= inner.state[weight].keys()
    assert not torch.equal(weight, first)
    moved: list[bool] = []
    outer.after_move = lambda: moved.append(True)
    outer.back_to_kept()
    assert torch.equal(weight, first)
    assert moved == [True]
