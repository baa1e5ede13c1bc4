"""Every recipe on one device is torchao's own module, bit by bit: output, gradients of input and of weight."""

import dataclasses
import logging

import pytest
import torch

from titan_exp.quantization.float8 import Float8, float8_linear
from titan_exp.quantization.mxfp8 import KernelPreference, MXFP8Dim0CastKernelChoice, ScaleCalculationMode, mxfp8_linear

NAMES = {"tensorwise": (False, False), "rowwise": (True, False), "rowwise_with_gw_hp": (True, True)}


def passes(module, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    x, weight = x.clone().requires_grad_(), weight.detach().requires_grad_()
    output = module(x, weight)
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).mul(1e-3).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, [x, weight], gradient)]


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    # Channels of very different sizes, some of which underflow.
    sizes = torch.randn(96, generator=random).mul(3).exp()
    x = torch.randn(2, 48, 96, generator=random) * sizes
    return x.to(dtype), torch.randn(160, 96, generator=random).mul(0.1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_float8(name: str, power_of_two: bool, dtype: torch.dtype):
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(name), emulate=True, round_scales_to_power_of_2=power_of_two
    )

    def theirs(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        linear = torch.nn.Linear(96, 160, bias=False)
        # Not as a parameter of the module, so that the gradient is that of the weight that was given.
        converted = Float8Linear.from_float(linear, config)
        del converted.weight
        converted.weight = weight  # type: ignore[assignment]
        return converted(x)

    rowwise, high_precision = NAMES[name]
    recipe = Float8(rowwise, high_precision, power_of_two, emulated=True)
    expected = passes(theirs, *operands(dtype))
    found = passes(lambda x, weight: float8_linear(x, weight, None, recipe), *operands(dtype))
    for mine, their in zip(found, expected, strict=True):
        assert torch.equal(mine, their)
    exact = passes(torch.nn.functional.linear, *operands(dtype))
    assert not torch.equal(found[0], exact[0]), "nothing was rounded"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp8(dtype: torch.dtype):
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    from torchao.prototype.mx_formats.config import MXFP8Dim1CastKernelChoice

    def theirs(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        e4m3 = torch.float8_e4m3fn
        kernels = KernelPreference.EMULATED, MXFP8Dim0CastKernelChoice.TORCH, MXFP8Dim1CastKernelChoice.TORCH
        return mx_mm.apply(x, weight, e4m3, e4m3, e4m3, 32, *kernels, ScaleCalculationMode.RCEIL, False)

    expected = passes(theirs, *operands(dtype))
    found = passes(lambda x, weight: mxfp8_linear(x, weight, emulated=True), *operands(dtype))
    for mine, their in zip(found, expected, strict=True):
        assert torch.equal(mine, their)


@pytest.mark.parametrize("recipe", [Float8(False, False, True, True), Float8(True, False, True, True), "mx"])
def test_powers_of_two_forget_whom_they_share_a_scale_with(recipe: Float8 | str):
    """Halves of a matrix, and the whole: a number is rounded to the same value unless it is tiny beside the largest."""
    random = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 96, generator=random), torch.randn(32, 96, generator=random)
    x[32:] *= 100

    def gradient_of_weight(part: slice) -> torch.Tensor:
        mine = weight.clone().requires_grad_()
        if isinstance(recipe, Float8):
            output = float8_linear(x[part], mine, None, recipe)
        else:
            output = mxfp8_linear(x[part], mine, emulated=True)
        output.backward(torch.ones_like(output))
        assert mine.grad is not None
        return mine.grad

    halves = gradient_of_weight(slice(0, 32)) + gradient_of_weight(slice(32, 64))
    torch.testing.assert_close(gradient_of_weight(slice(0, 64)), halves, rtol=1e-5, atol=100 * 2**-14)


@pytest.mark.parametrize("recipe", [Float8(False, False, False, True), Float8(True, False, False, True)])
def test_parts_have_the_scales_of_the_whole(recipe: Float8):
    """What ranks that divide inputs, or outputs, compute with common largest values is the whole product."""
    x, weight = operands(torch.float32)
    expected = passes(lambda x, weight: float8_linear(x, weight, None, recipe), x, weight)

    class Together:
        """Remembers every rank's values in a first round, and gives their largest in a second."""

        def __init__(self) -> None:
            self.values: list[list[torch.Tensor]] = []
            self.calls = 0

        def first(self, value: torch.Tensor) -> torch.Tensor:
            self.values[-1].append(value)
            return value

        def second(self, value: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return torch.stack([values[self.calls - 1] for values in self.values]).amax(0)

    def parts(dim: int) -> list[list[torch.Tensor]]:
        together, name = Together(), "input_amax_reduce" if dim else "output_amax_reduce"
        for how in (together.first, together.second):
            found = []
            for rank in range(2):
                together.values += [[]] if how == together.first else []
                together.calls = 0
                shared = dataclasses.replace(recipe, **{name: how})
                mine = weight.chunk(2, dim)[rank]
                its_x = x.chunk(2, -1)[rank].contiguous() if dim else x
                leaf, its_weight = its_x.clone().requires_grad_(), mine.clone().requires_grad_()
                output = float8_linear(leaf, its_weight, None, shared)
                gradient = torch.randn(2, 48, 160, generator=torch.Generator().manual_seed(1)).mul(1e-3)
                gradient = gradient if dim else gradient.chunk(2, -1)[rank].contiguous()
                found.append([output.detach(), *torch.autograd.grad(output, [leaf, its_weight], gradient)])
        return found

    rows, columns = parts(1), parts(0)
    torch.testing.assert_close(rows[0][0] + rows[1][0], expected[0], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(torch.cat([results[1] for results in rows], -1), expected[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([results[2] for results in rows], 1), expected[2], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(torch.cat([results[0] for results in columns], -1), expected[0], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(columns[0][1] + columns[1][1], expected[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([results[2] for results in columns], 0), expected[2], rtol=1e-4, atol=1e-3)


def test_a_backward_pass_in_two_computes_every_gradient_once(monkeypatch: pytest.MonkeyPatch):
    from titan_exp.parallel.pipeline_stage import BackwardSplit
    from titan_exp.quantization import mxfp8 as module

    products = []
    original = module._multiply
    monkeypatch.setattr(module, "_multiply", lambda *args: products.append(1) or original(*args))
    x, weight = torch.randn(32, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    output = mxfp8_linear(x * 1, weight, emulated=True)
    split = BackwardSplit(output, x, [("weight", torch.nn.Parameter(weight))])
    gradient = split.compute_input_gradient(torch.ones_like(output))
    assert len(products) == 2, "forward, and the gradient of the input"
    whole = torch.autograd.grad(mxfp8_linear(x * 1, weight, emulated=True), x, torch.ones_like(output))[0]
    assert torch.equal(gradient, whole)
