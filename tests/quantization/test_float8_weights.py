"""Float8 weights kept in both layouts: the numbers of a weight quantized at every use, and no others after a change."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.interpreted import DEVICES, needs_triton, run_kernels
from tests.quantization.test_dual_cast import bits, matrix
from titan_exp.models.blocks.linear import Linear
from titan_exp.quantization.float8 import E4M3, Float8, amax_of, cast, scale_of_amax
from titan_exp.quantization.quantize import Float8Weights, allocate_float8_weights
from titan_exp.quantization.recipes import Float8LinearImpl

RECIPES = {
    "tensorwise": Float8(False, False, power_of_two=False, emulated=True),
    "rowwise": Float8(True, False, power_of_two=False, emulated=True),
    "gw_hp": Float8(True, True, power_of_two=False, emulated=True),
}


def linears(recipe: Float8) -> nn.Sequential:
    """Two linear layers of different shapes and sizes of weights, in fp32."""
    made = nn.Sequential(Linear(64, 48, std=1.0), Linear(32, 80, std=1.0))
    for number, linear in enumerate(layers(made)):
        linear.linear_impl = Float8LinearImpl(recipe, precomputed=False)
        random = torch.Generator().manual_seed(number)
        weight = torch.randn(linear.out_features, linear.in_features, generator=random)
        linear.weight.data = weight * torch.randn(linear.in_features, generator=random).exp() * 10**number
    return made


def layers(model: nn.Module) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear)]


def impl(linear: Linear) -> Float8LinearImpl:
    assert isinstance(linear.linear_impl, Float8LinearImpl)
    return linear.linear_impl


def passes(model: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    """Outputs and gradients of all layers, of weights rounded to `dtype`."""
    results = []
    for number, linear in enumerate(layers(model)):
        x = torch.randn(3, 16, linear.in_features, generator=torch.Generator().manual_seed(7 + number)).to(dtype)
        weight = linear.weight.detach().to(dtype).requires_grad_()
        output = linear.linear_impl(x.requires_grad_(), weight)
        results += [output.detach(), *torch.autograd.grad(output, [x, weight], output.detach() * 1e-3)]
    return results


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert [bool(torch.equal(mine, theirs)) for mine, theirs in zip(found, expected, strict=True)] == [True] * 6


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kept_weights_are_those_quantized_at_use(name: str, dtype: torch.dtype):
    used, kept = linears(RECIPES[name]), linears(RECIPES[name])
    allocate_float8_weights(kept)
    weights = Float8Weights([kept], dtype)
    assert passes(kept, dtype)[0].isnan().all()  # not filled yet
    weights.refresh()
    assert_same(passes(kept, dtype), passes(used, dtype))
    # Emulation does not read the inverses.
    for quantized in filter(None, (impl(linear).quantized_weight for linear in layers(kept))):
        assert all(torch.equal(matrix.inverse, matrix.scale.reciprocal()) for matrix in quantized)
    before = passes(kept, dtype)
    for model in (used, kept):
        for linear in layers(model):
            linear.weight.data.mul_(-1.7)
    assert_same(passes(kept, dtype), before)
    weights.refresh()
    assert_same(passes(kept, dtype), passes(used, dtype))


@pytest.mark.parametrize("name", RECIPES)
def test_ranks_share_the_scales_of_dims_that_they_shard(name: str):
    """Of two ranks' amax, at the input of one layer and at the output of the other: in one message."""
    messages = []

    def reduced(amax: Tensor) -> Tensor:
        messages.append(amax.numel())
        return amax * 3

    shards: list[dict[str, Callable[[Tensor], Tensor]]] = [
        {"input_amax_reduce": reduced},
        {"output_amax_reduce": reduced},
    ]
    used, kept = linears(RECIPES[name]), linears(RECIPES[name])
    for model in (used, kept):
        for linear, shard in zip(layers(model), shards, strict=True):
            impl(linear).recipe = replace(RECIPES[name], **shard)
    allocate_float8_weights(kept)
    Float8Weights([kept], torch.float32).refresh()
    assert len(messages) == 1
    assert_same(passes(kept, torch.float32), passes(used, torch.float32))


def test_replicated_rows_are_quantized_at_use():
    model = linears(RECIPES["rowwise"])
    model[0].rows = (slice(0, 16),)  # type: ignore[assignment]  # as a ColumnParallelLinear's
    allocate_float8_weights(model)
    assert [impl(linear).quantized_weight is None for linear in layers(model)] == [True, False]


def kernels(device: str, dtype: torch.dtype, row_scales: bool, column_scales: bool) -> list[tuple[Tensor, Tensor]]:
    """Amax and casts of three matrices by one launch each, and by torch."""
    from titan_exp.ops.float8 import cast_weights, weights_amax

    weights = [matrix(dtype, height, width).to(device) for height, width in ((80, 144), (16, 32), (128, 64))]
    found = []
    for weight, both in zip(weights, weights_amax(weights), strict=True):
        found += [(bits(mine), bits(amax_of(weight, over).float())) for mine, over in zip(both, (-1, 0), strict=True)]
    compute = torch.bfloat16

    def scale(weight: Tensor, over: int | None) -> Tensor:
        return scale_of_amax(amax_of(weight.to(compute), over), E4M3, power_of_two=False)

    rows = [torch.empty_like(weight, dtype=E4M3) for weight in weights]
    columns = [torch.empty_like(weight.t(), dtype=E4M3, memory_format=torch.contiguous_format) for weight in weights]
    by_row = [scale(weight, -1 if row_scales else None) for weight in weights]
    by_column = [scale(weight, 0 if column_scales else None) for weight in weights]
    cast_weights(weights, by_row, by_column, rows, columns, dtype=compute)
    for weight, mine, transposed, scales, others in zip(weights, rows, columns, by_row, by_column, strict=True):
        found.append((bits(mine), bits(cast(weight.to(compute), scales, E4M3))))
        found.append((bits(transposed.t()), bits(cast(weight.to(compute), others, E4M3))))
    return found


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_one_launch_quantizes_all_weights(device: str):
    for dtype, scales in (
        (torch.float32, (True, True)),
        (torch.bfloat16, (True, False)),
        (torch.float32, (False,) * 2),
    ):
        [found] = run_kernels(1, device, kernels, dtype, *scales)
        assert [torch.equal(mine, theirs) for mine, theirs in found] == [True] * 12
