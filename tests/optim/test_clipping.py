"""Clipping by value, by group and by AdaGC, against their formulas."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from titan_exp.config.groups.optimizer import ParameterGroup
from titan_exp.config.groups.training import GradClipConfig
from titan_exp.optim.grad_clip import AVERAGE_NORM, GradientClipper
from titan_exp.optim.parameter_groups import named_parameters


class Clipped:
    """Two parameters and a clipper of their gradients."""

    def __init__(
        self,
        config: GradClipConfig,
        *,
        groups: Mapping[str, ParameterGroup] | None = None,
        max_norm: float | None = 1.0,
    ) -> None:
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        named, self.parameters = named_parameters([self.model]), list(self.model.parameters())
        self.clipper = GradientClipper(
            self.optimizer, named, self.parameters, config, groups or {}, max_norm=max_norm, pp_group=None
        )

    def step(self, weight: Tensor, bias: Tensor, step: int = 1) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Clipped gradients, and metrics."""
        self.model.weight.grad, self.model.bias.grad = weight.clone(), bias.clone()
        found = self.clipper.clip(torch.stack([weight.norm(), bias.norm()]).norm(), step=step)
        self.optimizer.step()
        self.clipper.keep()
        return self.model.weight.grad, self.model.bias.grad, {name: float(value) for name, value in found.items()}


WEIGHT, BIAS = torch.tensor([[3.0, 0.0, -1.0], [0.0, 2.0, 0.0]]), torch.tensor([0.5, -0.25])


def test_values_are_clamped_and_then_their_norm_is_limited():
    weight, bias, metrics = Clipped(GradClipConfig("value", max_value=0.4), max_norm=None).step(WEIGHT, BIAS)
    assert torch.equal(weight, WEIGHT.clamp(-0.4, 0.4))
    assert torch.equal(bias, torch.tensor([0.4, -0.25]))
    assert metrics == {"clip/share": pytest.approx(4 / 8), "clip/factor": 1}
    both = torch.cat([weight.flatten(), bias])
    limited, _, metrics = Clipped(GradClipConfig("value", max_value=0.4), max_norm=0.1).step(WEIGHT, BIAS)
    assert metrics["clip/factor"] == pytest.approx(float(0.1 / both.norm()), rel=1e-4)
    torch.testing.assert_close(limited, weight * 0.1 / both.norm())


def test_a_group_has_a_norm_of_its_own():
    own = {"biases": ParameterGroup(("vector",), max_grad_norm=0.1)}
    weight, bias, metrics = Clipped(GradClipConfig(), groups=own, max_norm=100.0).step(WEIGHT, BIAS)
    assert torch.equal(weight, WEIGHT)
    torch.testing.assert_close(bias, BIAS * 0.1 / BIAS.norm())
    norms = {"clip/norm/rest": float(WEIGHT.norm()), "clip/norm/biases": float(BIAS.norm())}
    assert metrics == pytest.approx({**norms, "clip/factor": float(0.1 / BIAS.norm())}, rel=1e-5)


def test_adagc_limits_each_parameter_by_its_average_norm():
    clipped = Clipped(GradClipConfig("adagc", relative=1.5, decay=0.9, warmup_steps=2))
    whole = float(torch.stack([WEIGHT.norm(), BIAS.norm()]).norm())
    # In the warm-up the global norm is limited, and the smallest clipped norm kept.
    for step, scale in ((1, 1.0), (2, 0.1)):
        weight, _, _ = clipped.step(WEIGHT * scale, BIAS * scale, step)
        torch.testing.assert_close(weight, WEIGHT * scale * min(1.0, 1 / (whole * scale)))
    average = {name: float(value.norm()) * 0.1 for name, value in (("weight", WEIGHT), ("bias", BIAS))}
    kept = [float(clipped.optimizer.state[parameter][AVERAGE_NORM]) for parameter in clipped.parameters]
    assert kept == pytest.approx([average["weight"], average["bias"]], rel=1e-5)
    # Then each by its own: the weight's gradient is too large, the bias's is not.
    weight, bias, metrics = clipped.step(WEIGHT, BIAS * 0.12, 3)
    torch.testing.assert_close(weight, WEIGHT * 0.15)
    torch.testing.assert_close(bias, BIAS * 0.12)
    assert metrics == pytest.approx({"clip/share": 0.5, "clip/factor": 0.15}, rel=1e-5)
    expected = [average["weight"] * (0.9 + 0.1 * 1.5), average["bias"] * (0.9 + 0.1 * 1.2)]
    kept = [float(clipped.optimizer.state[parameter][AVERAGE_NORM]) for parameter in clipped.parameters]
    assert kept == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("warmup", [0, 5])
def test_adagc_takes_no_threshold_of_zero(warmup: int):
    clipped = Clipped(GradClipConfig("adagc", warmup_steps=warmup), max_norm=None)
    clipped.step(torch.zeros(2, 3), BIAS, 1)
    weight, _, _ = clipped.step(WEIGHT, BIAS, 2)
    assert torch.equal(weight, WEIGHT)
    assert float(clipped.clipper._adagc.averages[0]) == pytest.approx(float(WEIGHT.norm()))  # type: ignore[union-attr]


def test_a_warm_up_counts_from_where_the_averages_begin():
    """A run that continues one without AdaGC warms up first; one that continues its own averages goes on."""
    config = GradClipConfig("adagc", warmup_steps=2, relative=1.05)
    begun = Clipped(config)
    begun.clipper.restore(None, 10)
    weight, _, _ = begun.step(WEIGHT, BIAS, step=12)
    assert float(weight.norm()) < 1, "limited by the norm of all"
    assert begun.clipper.state() == {"begun": 10}
    assert torch.equal(begun.step(WEIGHT, BIAS, step=13)[0], weight * begun.clipper._adagc._config.relative)  # type: ignore[union-attr]
    again = Clipped(config)
    again.optimizer.load_state_dict(begun.optimizer.state_dict())
    again.clipper.restore(begun.clipper.state(), 12)
    assert again.clipper._adagc.begun == 10  # type: ignore[union-attr]
    older = Clipped(config)
    older.optimizer.load_state_dict(begun.optimizer.state_dict())
    older.clipper.restore(None, 12)
    assert older.clipper.state() == {}
