"""Casts both ways in one pass: torchao's own numbers and scales, bit by bit, and the products made of them.

Triton's interpreter has no float8 instruction: there our own rounding is what is held against torch's, and on a GPU the
instruction is.
"""

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.interpreted import DEVICES, needs_triton, run_kernels
from titan_exp.quantization.float8 import E4M3, E5M2, Float8, cast, float8_linear, scale_of

pytestmark = needs_triton


def matrix(dtype: torch.dtype, height: int = 80, width: int = 144) -> Tensor:
    """Sizes that are not multiples of a square; channels of very different sizes, some of which underflow; a row of
    zeros."""
    random = torch.Generator().manual_seed(0)
    sizes = torch.randn(width, generator=random).mul(4).exp()
    made = torch.randn(height, width, generator=random) * sizes
    made[3] = 0
    return made.to(dtype)


def bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(torch.uint8 if tensor.element_size() == 1 else torch.int32)


def casts(device: str, dtype: torch.dtype, rowwise: bool, power_of_two: bool) -> list[tuple[str, Tensor, Tensor]]:
    """Of a matrix both ways: what it is, ours, torchao's."""
    recipe = Float8(rowwise, False, power_of_two, emulated=False)
    tensor, found = matrix(dtype).to(device), []
    for float8 in (E4M3, E5M2):
        mine = recipe.quantize_dual(tensor, float8, None)
        for way, (numbers, scale, _), over in zip(("rows", "columns"), mine, (-1, 0), strict=True):
            its = scale_of(tensor, float8, over=over if rowwise else None, power_of_two=power_of_two)
            found.append((f"{way} {float8}", bits(numbers), bits(cast(tensor, its, float8))))
            found.append((f"scales of {way}", bits(scale), bits(its)))
        assert mine[1][0].t().is_contiguous()
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rowwise", [True, False])
def test_numbers_and_scales_are_torchaos(device: str, rowwise: bool):
    for dtype, power_of_two in ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, False)):
        [found] = run_kernels(1, device, casts, dtype, rowwise, power_of_two)
        for what, mine, theirs in found:
            assert torch.equal(mine, theirs), (what, dtype, power_of_two)
        assert len(found) == 8


def every_number(device: str) -> list[tuple[Tensor, Tensor]]:
    """All bf16 numbers up to the largest of the type, and halfway between all float8 numbers, under a scale of 1."""
    from titan_exp.ops.float8 import dual_cast

    found = []
    for float8 in (E4M3, E5M2):
        numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
        own = torch.arange(256, dtype=torch.uint8).view(float8).float()
        own = own[own.isfinite()].sort().values
        halves = (own[1:] + own[:-1]) / 2
        near = [halves, halves.nextafter(torch.tensor(1e9)), halves.nextafter(torch.tensor(-1e9)), own]
        tensor = torch.cat([numbers[numbers.isfinite()], *near])
        tensor = torch.cat([tensor, tensor.new_zeros(-len(tensor) % 64)]).view(-1, 64).to(device)
        one = torch.ones((), device=device)
        rows, transposed = dual_cast(tensor, one, one, float8)
        expected = cast(tensor, one, float8)
        found += [(bits(rows), bits(expected)), (bits(transposed.t()), bits(expected))]
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_every_number_is_rounded_as_torch_does(device: str):
    [found] = run_kernels(1, device, every_number)
    for mine, theirs in found:
        assert torch.equal(mine, theirs)


def products(device: str, rowwise: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Output and both gradients, with and without; what is multiplied is the same, so is the result but for the order
    of sums."""
    recipe = Float8(rowwise, False, power_of_two=True, emulated=device == "cpu")
    random = torch.Generator().manual_seed(1)
    weight = torch.randn(96, 144, generator=random).to(device, torch.bfloat16)
    gradient = torch.randn(2, 40, 96, generator=random).mul(1e-3).to(device, torch.bfloat16)
    results = []
    for dual_cast in (True, False):
        x = matrix(torch.bfloat16).view(2, 40, 144).to(device).requires_grad_()
        its_weight = weight.clone().requires_grad_()
        output = float8_linear(x, its_weight, None, dataclasses.replace(recipe, dual_cast=dual_cast))
        results.append(
            [output.detach().cpu(), *(grad.cpu() for grad in torch.autograd.grad(output, [x, its_weight], gradient))]
        )
    return results[0], results[1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rowwise", [True, False])
def test_products_are_the_same(device: str, rowwise: bool):
    [(found, expected)] = run_kernels(1, device, products, rowwise)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=1e-6 * float(theirs.abs().max()))


def compiled(device: str, rowwise: bool) -> tuple[list[Tensor], list[Tensor]]:
    """In a graph of the compiler's: the kernels of gradients are operators that it does not look into; inputs are cast
    by torch."""
    recipe = Float8(rowwise, False, power_of_two=True, emulated=device == "cpu", dual_cast=True)
    results = []
    for compile_ in (True, False):
        x = matrix(torch.bfloat16).to(device).requires_grad_()
        weight = torch.ones(96, 144, device=device, dtype=torch.bfloat16, requires_grad=True)
        product = lambda x, weight: float8_linear(x, weight, None, recipe)  # noqa: E731
        call = torch.compile(product, backend="aot_eager", fullgraph=True) if compile_ else product
        output = call(x, weight)
        results.append(
            [output.detach().cpu(), *(grad.cpu() for grad in torch.autograd.grad(output.sum(), [x, weight]))]
        )
    return results[0], results[1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rowwise", [True, False])
def test_they_can_be_compiled(device: str, rowwise: bool):
    [(found, expected)] = run_kernels(1, device, compiled, rowwise)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
