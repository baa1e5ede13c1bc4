"""AdamW with moments in fewer bits: torch's where they have all, torchao's where blocks are the same."""

import pytest
import torch

from titan_exp.optim.adamw import LowPrecisionAdamW

HOW = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}


def weights() -> list[torch.nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=random)) for shape in ((48, 64), (64,), (16, 40))]


def train(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], steps: int = 8) -> None:
    random = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in parameters:
            size = torch.randn(parameter.shape, generator=random).mul(0.5).exp()
            parameter.grad = torch.randn(parameter.shape, generator=random) * size
        optimizer.step()


def ours(precision: str, steps: int = 8) -> tuple[list[torch.nn.Parameter], LowPrecisionAdamW]:
    parameters = weights()
    optimizer = LowPrecisionAdamW([{"params": parameters, "weight_decay": 0.1}], **HOW, precision=precision)
    train(optimizer, parameters, steps)
    return parameters, optimizer


def torchs(steps: int = 8) -> list[torch.nn.Parameter]:
    parameters = weights()
    train(torch.optim.AdamW(parameters, **HOW, weight_decay=0.1), parameters, steps)
    return parameters


def test_with_all_bits_it_is_torchs():
    for mine, theirs in zip(ours("fp32")[0], torchs(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("precision", "bound"), [("bf16", 0.01), ("int8", 0.03), ("fp8", 0.05)])
def test_the_first_step_is_exact_and_later_ones_are_near(precision: str, bound: float):
    for mine, theirs in zip(ours(precision, 1)[0], torchs(1), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    before, exact, found = weights(), torchs(), ours(precision)[0]
    for start, mine, theirs in zip(before, found, exact, strict=True):
        error = (mine - theirs).norm() / (theirs - start).norm()
        assert error < bound
    assert not torch.equal(found[0], exact[0])
    vectors_are_exact = precision != "bf16"
    assert torch.allclose(found[1], exact[1], atol=1e-6) == vectors_are_exact


def test_fp8_keeps_second_moments_of_seven_decades_in_a_block():
    """Without the root the smallest would be stored as 0, and their updates would be far too large."""
    sizes, random, weights = torch.logspace(0, -3.5, 32), torch.Generator().manual_seed(0), []
    gradients = [torch.randn(4, 32, generator=random) * sizes for _ in range(4)]
    for precision in ("fp32", "fp8"):
        parameter = torch.nn.Parameter(torch.zeros(4, 32))
        optimizer = LowPrecisionAdamW([{"params": [parameter], "weight_decay": 0.0}], **HOW, precision=precision)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
        weights.append(parameter.detach() / HOW["lr"])
    exact, found = weights
    assert (found - exact).abs().max() < 1


def test_it_is_torchaos_in_the_same_blocks():
    from torchao.optim.adam import single_param_adam
    from torchao.optim.subclass_8bit import OptimState8bit

    parameter, random = weights()[0], torch.Generator().manual_seed(1)
    moments = [OptimState8bit.zeros(parameter.shape, signed, 32) for signed in (True, False)]
    shapes = [weight.shape for weight in weights()]
    for step in range(1, 9):
        gradients = []
        for shape in shapes:
            size = torch.randn(shape, generator=random).mul(0.5).exp()
            gradients.append(torch.randn(shape, generator=random) * size)
        lr, count = torch.tensor(1e-2), torch.tensor(float(step))
        with torch.no_grad():
            single_param_adam(
                parameter, gradients[0], count, moments[0], moments[1], None, lr, 0.9, 0.95, 0.1, 1e-8, True, False
            )
    found, optimizer = ours("int8")
    torch.testing.assert_close(found[0], parameter, rtol=1e-5, atol=1e-5)
    state = optimizer.state[found[0]]
    assert state["exp_avg"].dtype == torch.uint8
    assert (state["exp_avg"] == moments[0].codes.view(torch.uint8)).float().mean() > 0.99
    assert sum(state[key].nbytes for key in state if key.startswith("exp_avg")) == 2.25 * parameter.numel()
    # Neither a vector nor rows of 40 are in blocks.
    assert {optimizer.state[parameter]["exp_avg"].dtype for parameter in found[1:]} == {torch.float32}
