from dataclasses import replace

import pytest
import torch

from tests.models.shapes import real_model
from titan_exp.config.groups.optimizer import OptimizerConfig
from titan_exp.optim.build import build_optimizer

ADAMW = OptimizerConfig(
    name="adamw",
    lr=1e-2,
    weight_decay=0.1,
    betas=(0.9, 0.95),
    eps=1e-8,
    decay_vectors=False,
    implementation="fused",
    state_precision="fp32",
)


def test_vectors_are_not_decayed():
    model = real_model()
    decayed, kept = build_optimizer(ADAMW, model.parameters()).param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert all(parameter.dim() == 2 for parameter in decayed["params"])
    assert len(kept["params"]) == 2 * 2 + 1
    everything = sum(len(group["params"]) for group in (decayed, kept))
    assert everything == len(list(model.parameters()))


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for_loop"])
def test_adamw_is_the_published_update(implementation):
    """One parameter, two steps, against Loshchilov and Hutter's formula written out in fp64."""
    module = torch.nn.Linear(3, 2, bias=False)
    start = module.weight.detach().double().clone()
    optimizer = build_optimizer(replace(ADAMW, implementation=implementation), module.parameters())
    gradients = [torch.randn(2, 3), torch.randn(2, 3)]
    for gradient in gradients:
        module.weight.grad = gradient.clone()
        optimizer.step()
    weight, mean, square = start, torch.zeros(2, 3).double(), torch.zeros(2, 3).double()
    for step, gradient in enumerate((g.double() for g in gradients), 1):
        weight = weight * (1 - 1e-2 * 0.1)
        mean, square = 0.9 * mean + 0.1 * gradient, 0.95 * square + 0.05 * gradient**2
        weight = weight - 1e-2 * (mean / (1 - 0.9**step)) / ((square / (1 - 0.95**step)).sqrt() + 1e-8)
    torch.testing.assert_close(module.weight.detach().double(), weight, atol=1e-6, rtol=1e-5)


def test_an_optimizer_of_the_users_own():
    config = replace(ADAMW, name="torch.optim.SGD", options={"momentum": 0.5})
    optimizer = build_optimizer(config, real_model().parameters())
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["momentum"] == 0.5
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
