"""A device's own instructions against the emulated recipe: the same rounding, sums in another order."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.quantization.test_dual_cast import bits
from tests.quantization.test_float8_weights import RECIPES as FLOAT8
from tests.quantization.test_float8_weights import linears
from titan_exp.quantization.float8 import Float8, float8_linear
from titan_exp.quantization.mxfp8 import mxfp8_linear
from titan_exp.quantization.nvfp4 import NVFP4, nvfp4_linear
from titan_exp.quantization.quantize import Float8Weights, allocate_float8_weights
from titan_exp.quantization.recipes import MIN_CAPABILITY

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def eight(rowwise: bool, high_precision: bool, x: Tensor, weight: Tensor, *, emulated: bool) -> Tensor:
    return float8_linear(x, weight, None, Float8(rowwise, high_precision, power_of_two=True, emulated=emulated))


def four(power_of_two: bool, x: Tensor, weight: Tensor, *, emulated: bool) -> Tensor:
    recipe = NVFP4(power_of_two=power_of_two, stochastic=False)
    if emulated:
        return nvfp4_linear(x, weight, None, recipe)
    from titan_exp.quantization.nvfp4_kernels import nvfp4_native

    return nvfp4_native(x, weight, None, recipe)


RECIPES: dict[str, Callable[..., Tensor]] = {
    "float8_tensorwise": partial(eight, False, False),
    "float8_rowwise": partial(eight, True, False),
    "float8_rowwise_gw_hp": partial(eight, True, True),
    "mxfp8": mxfp8_linear,
    "nvfp4": partial(four, True),
    "nvfp4, any scales": partial(four, False),
}


@pytest.mark.parametrize("name", RECIPES)
def test_instructions_compute_what_is_emulated(name: str):
    if torch.cuda.get_device_capability() < MIN_CAPABILITY[name.partition(",")[0]]:
        pytest.skip(f"{torch.cuda.get_device_name()} lacks the instructions of {name}")
    random = torch.Generator("cuda").manual_seed(0)
    x, weight, gradient = (
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=random)
        for shape in ((2, 128, 256), (512, 256), (2, 128, 512))
    )

    def passes(emulated: bool) -> list[torch.Tensor]:
        ours, its_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        output = RECIPES[name](ours, its_weight, emulated=emulated)
        return [output.detach(), *torch.autograd.grad(output, [ours, its_weight], gradient)]

    for real, emulated in zip(passes(False), passes(True), strict=True):
        error = (real.float() - emulated.float()).norm() / emulated.float().norm()
        assert error < 5e-3  # bf16 rounds results by up to 4e-3, and Hopper adds up in fewer than 24 bits


@pytest.mark.parametrize("name", ["float8_rowwise", "mxfp8"])
def test_kernels_of_experts_compute_what_is_emulated(name: str):
    from titan_exp.quantization.grouped import EmulatedGroupedLinear, GroupedFloat8, GroupedMX, NativeGroupedLinear
    from titan_exp.quantization.recipes import Hardware

    if torch.cuda.get_device_capability() < MIN_CAPABILITY[name] or not Hardware().has_grouped_kernels(
        name, torch.device("cuda")
    ):
        pytest.skip(f"torchao has no kernel of {name} for experts on {torch.cuda.get_device_name()}")
    random = torch.Generator("cuda").manual_seed(0)
    x, weight, gradient = (
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=random)
        for shape in ((300, 256), (4, 512, 256), (300, 512))
    )
    # Uneven, none, and rows that are nobody's.
    ends = torch.tensor([7, 7, 150, 280], device="cuda", dtype=torch.int32)
    recipe = GroupedMX() if name == "mxfp8" else GroupedFloat8(Float8(True, False, power_of_two=True, emulated=True))

    def passes(product: Callable[..., Tensor]) -> list[Tensor]:
        ours, its_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        output = product(ours, its_weight, ends)
        return [output.detach(), *torch.autograd.grad(output, [ours, its_weight], gradient)]

    for real, emulated in zip(passes(NativeGroupedLinear(name)), passes(EmulatedGroupedLinear(recipe)), strict=True):
        error = (real.float() - emulated.float()).norm() / emulated.float().norm()
        assert error < 5e-3
    assert not passes(NativeGroupedLinear(name))[0][280:].any()


def test_tokens_cast_to_their_rows_are_rows_cast():
    """Values and scales of our kernel and torchao's, and all three matmuls, to the bit."""
    from titan_exp.models.blocks.linear import GroupedLinearImpl
    from titan_exp.ops.float8 import E4M3, cast_tokens
    from titan_exp.ops.moe.permutation import PaddedOrder, permute
    from titan_exp.quantization.grouped import NativeGroupedLinear
    from titan_exp.quantization.grouped_kernels import OF_TOKENS, fp8_grouped_mm
    from titan_exp.quantization.recipes import Hardware

    if not Hardware().has_grouped_kernels("float8_rowwise", torch.device("cuda")) or not OF_TOKENS:
        pytest.skip("no kernel that takes tokens here")
    random = torch.Generator("cuda").manual_seed(0)
    tokens, weight = (
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=random)
        for shape in ((300, 1280), (8, 512, 1280))
    )
    tokens *= torch.logspace(-20, 5, 300, device="cuda")[:, None]
    tokens[7] = 0
    order = PaddedOrder.sort(torch.rand(300, 7, device="cuda", generator=random).argsort(-1)[:, :3], 8, 16)
    rows = permute(tokens, order.order, order.inverse, order.padding)
    mine = cast_tokens(tokens, order.inverse, order.padding)
    theirs = fp8_grouped_mm.triton_fp8_rowwise_2d_scale_and_cast(rows, E4M3, round_scales_to_power_of_2=True)
    assert torch.equal(mine[0].float(), theirs[0].float())
    assert torch.equal(mine[1], theirs[1].squeeze(-1))
    native = NativeGroupedLinear("float8_rowwise")
    gradient = torch.randn(len(rows), 512, device="cuda", dtype=torch.bfloat16, generator=random)
    gradient.index_fill_(0, order.padding, 0)

    def passes(product: Callable[..., Tensor]) -> list[Tensor]:
        leaves = tokens.clone().requires_grad_(), weight.clone().requires_grad_()
        output = product(*leaves, order)
        return [output.detach()[order.inverse], *torch.autograd.grad(output, leaves, gradient)]

    assert all(map(torch.equal, passes(native.of_tokens), passes(partial(GroupedLinearImpl.of_tokens, native))))


@pytest.mark.parametrize("name", FLOAT8)
def test_kept_weights_are_those_of_the_emulation(name: str):
    """Amax and casts of all weights by a launch each, against torch's on a CPU, to the bit."""
    capability = (9, 0) if FLOAT8[name].rowwise else (8, 9)
    if torch.cuda.get_device_capability() < capability:
        pytest.skip(f"{torch.cuda.get_device_name()} lacks the instructions")
    found = []
    for device, emulated in (("cuda", False), ("cpu", True)):
        model = linears(replace(FLOAT8[name], emulated=emulated)).to(device)
        allocate_float8_weights(model)
        Float8Weights([model], torch.bfloat16).refresh()
        found.append([bits(buffer) for buffer in model.buffers()])
    assert len(found[0]) == 12
    assert [torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True)] == [True] * 12
