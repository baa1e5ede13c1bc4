"""NVFP4: its rounding is torchao's bit by bit, its products err by what the format does, noise is right on average."""

import sys

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from titan_exp.config.torch_features import torchao_violations
from titan_exp.quantization import nvfp4 as module
from titan_exp.quantization.nvfp4 import (
    BLOCK,
    NVFP4,
    SIGNS,
    nvfp4_linear,
    rounded,
    tensor_scale,
    transform,
    transformed,
)

RECIPE = NVFP4(power_of_two=True, stochastic=False)


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Columns of very different sizes, and rows with blocks too small for their scale."""
    random = torch.Generator().manual_seed(seed)
    numbers = torch.randn(rows, columns, generator=random) * torch.randn(columns, generator=random).mul(3).exp()
    numbers[3] *= 1e-7
    numbers[5] = 0
    return numbers.to(dtype)


def theirs(numbers: Tensor, scale: Tensor) -> Tensor:
    """torchao's numbers of four bits times their blocks' scales."""
    from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    scales, packed = nvfp4_quantize(numbers, BLOCK, scale)
    numbers_of_blocks = f4_unpacked_to_f32(unpack_uint4(packed)).unflatten(-1, (-1, BLOCK))
    return (numbers_of_blocks * scales.float()[..., None]).flatten(-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("power_of_two", [True, False])
def test_rounding_is_torchaos(power_of_two: bool, dtype: torch.dtype):
    numbers = matrix(64, 96, dtype)
    scale = tensor_scale(numbers.abs().amax(), power_of_two=power_of_two)
    found = rounded(numbers, scale)
    assert torch.equal(found, theirs(numbers, scale))
    assert 10 < found.unique().numel() < 2000
    assert not found[3].any(), "too small for the smallest scale of a block"


def test_a_tensor_s_scale_is_torchaos_or_the_next_power_of_two():
    from torchao.prototype.mx_formats.nvfp4_tensor import per_tensor_amax_to_scale

    amax = torch.cat([torch.tensor([2688.0, 2688.01, 1e-30, 1e30]), torch.rand(100).exp()])
    exact = tensor_scale(amax, power_of_two=False)
    assert torch.equal(exact, per_tensor_amax_to_scale(amax))
    power = tensor_scale(amax, power_of_two=True)
    assert torch.equal(power.log2(), power.log2().round())
    assert ((exact <= power) & (power < 2 * exact)).all()
    assert power[0] == 1
    assert tensor_scale(torch.tensor(torch.nan), power_of_two=True).isnan()
    zeros = torch.zeros(16, 16)
    assert torch.equal(rounded(zeros, tensor_scale(zeros.amax(), power_of_two=True)), zeros)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("power_of_two", [True, False])
def test_what_is_not_finite_is_not_hidden(power_of_two: bool, bad: float):
    numbers = matrix(32, 32)
    numbers[1, 20] = bad
    scale = tensor_scale(numbers.abs().amax(), power_of_two=power_of_two)
    assert not (rounded(numbers, scale) * scale)[1, 16:].isfinite().any()


def test_square_blocks_are_the_same_from_both_sides():
    numbers = matrix(64, 96)
    scale = tensor_scale(numbers.abs().amax(), power_of_two=True)
    square = rounded(numbers, scale, square=True)
    assert torch.equal(square, rounded(numbers.t(), scale, square=True).t())
    assert not torch.equal(square, rounded(numbers, scale))
    # Where every row of a block has the block's largest, torchao's blocks of a row have the scale of a square.
    blocks = numbers.unflatten(0, (-1, 16)).unflatten(-1, (-1, 16))
    blocks[..., 7] = blocks.abs().amax((1, 3), keepdim=True)[..., 0]
    numbers = blocks.flatten(2).flatten(0, 1)
    assert torch.equal(rounded(numbers, scale, square=True), theirs(numbers, scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_transform_is_torchaos_and_its_own_inverse_s_transpose(dtype: torch.dtype):
    from torchao.prototype.moe_training.nvfp4_training.hadamard_utils import get_rht_matrix

    made = transform(torch.device("cpu"), dtype)
    assert torch.equal(made, get_rht_matrix(SIGNS, "cpu", dtype, 16))
    assert torch.equal(made @ made.t(), torch.eye(16, dtype=dtype))
    tokens = torch.randn(64, 24, dtype=dtype, generator=torch.Generator().manual_seed(0))
    back = (transformed(tokens).unflatten(1, (-1, 16)) @ made.t()).flatten(1).t()
    torch.testing.assert_close(back, tokens, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-5)
    # An outlier is a quarter of itself in all of them; and of tokens that are alike none becomes one, thanks to signs.
    outlier = torch.zeros(16, 1, dtype=dtype).index_fill(0, torch.tensor([5]), 8)
    assert torch.equal(transformed(outlier).abs(), torch.full((1, 16), 2, dtype=dtype))
    assert transformed(torch.ones(16, 1, dtype=dtype)).abs().amax() <= 2


def passes(x: Tensor, weight: Tensor, gradient: Tensor, recipe: NVFP4) -> list[Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    output = nvfp4_linear(x, weight, None, recipe)
    return [output.detach(), *torch.autograd.grad(output, [x, weight], gradient)]


def possible(numbers: Tensor, *, square: bool = False) -> Tensor:
    """How far numbers may be moved: half of the largest step, 2, by a scale that is up to 17/16 of the exact one."""
    height = BLOCK if square else 1
    blocks = numbers.reshape(numbers.shape[0] // height, height, -1, BLOCK)
    largest = blocks.abs().amax((1, 3), keepdim=True).expand_as(blocks).reshape(numbers.shape)
    return largest / 6 * 17 / 16 + 6 * 2.0**-7 * tensor_scale(numbers.abs().amax(), power_of_two=True).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_err_by_no_more_than_the_format(dtype: torch.dtype):
    random = torch.Generator().manual_seed(0)
    x, weight = matrix(96, 64), torch.randn(48, 64, generator=random)
    gradient = torch.randn(96, 48, generator=random) * 1e-5
    x, weight, gradient = x.to(dtype), weight.to(dtype), gradient.to(dtype)
    found = passes(x[None], weight, gradient[None], RECIPE)
    wide, heavy, back = x.double(), weight.double(), gradient.double()

    def bound(left: Tensor, right: Tensor, moved: Tensor, other: Tensor) -> Tensor:
        return moved @ right.abs().t() + left.abs() @ other.t() + moved @ other.t()

    by_token, by_row = transformed(wide), transformed(back)
    pairs = [
        (wide @ heavy.t(), bound(wide, heavy, possible(wide), possible(heavy, square=True))),
        (back @ heavy, bound(back, heavy.t(), possible(back), possible(heavy, square=True).t())),
        (back.t() @ wide, bound(by_row, by_token, possible(by_row), possible(by_token))),
    ]
    for mine, (exact, most) in zip(found, pairs, strict=True):
        assert mine.dtype == dtype
        error = (mine.reshape(exact.shape).double() - exact).abs()
        slack = exact.abs() * (2**-8 if dtype == torch.bfloat16 else 2**-20)
        assert (error <= most * 1.01 + slack).all()
        relative = float(error.norm() / exact.norm())
        assert 0.02 < relative < 0.25, "that it is rounded at all, and typically by a tenth"


def test_forward_and_backward_see_the_same_weight():
    weight = matrix(48, 64, seed=2)
    weight[3], weight[5] = 1, 2
    # Six in a block of its own is exact.
    output, *_ = passes(torch.eye(64) * 6, weight, torch.zeros(64, 48), RECIPE)
    _, of_x, _ = passes(torch.zeros(48, 64), weight, torch.eye(48) * 6, RECIPE)
    assert torch.equal(output.t(), of_x)
    assert not torch.equal(of_x, weight * 6)


def test_noise_is_right_on_average_and_only_of_gradients():
    torch.manual_seed(0)
    numbers = torch.randn(4, 32)
    scale = tensor_scale(numbers.abs().amax(), power_of_two=True)
    draws = torch.stack([rounded(numbers, scale, stochastic=True) * scale for _ in range(4000)])
    assert (draws.amax(0) - draws.amin(0)).amax() > 0.1
    # A block's largest number is cut off where the scale of the block was rounded down, by up to a sixteenth.
    largest = numbers.unflatten(1, (-1, 16)).abs().amax(-1, keepdim=True).expand(4, 2, 16).flatten(1)
    others = numbers.abs() < 0.9 * largest
    assert ((draws.mean(0) - numbers).abs()[others] < 0.03).all()

    x, weight, gradient = (torch.randn(*shape) for shape in ((32, 64), (48, 64), (32, 48)))
    noisy = NVFP4(power_of_two=True, stochastic=True)
    torch.manual_seed(1)
    first = passes(x, weight, gradient, noisy)
    again = passes(x, weight, gradient, noisy)
    torch.manual_seed(1)
    repeated = passes(x, weight, gradient, noisy)
    nearest = passes(x, weight, gradient, RECIPE)
    assert torch.equal(first[0], nearest[0])
    for which in (1, 2):
        assert not torch.equal(first[which], nearest[which])
        assert not torch.equal(first[which], again[which])
        assert torch.equal(first[which], repeated[which])


def test_only_the_gradient_of_the_weight_is_of_transformed_tokens(monkeypatch: pytest.MonkeyPatch):
    random = torch.Generator().manual_seed(0)
    x, weight, gradient = (torch.randn(*shape, generator=random) for shape in ((32, 64), (48, 64), (32, 48)))
    found = passes(x, weight, gradient, RECIPE)
    monkeypatch.setattr(module, "transformed", lambda tokens: tokens.t())
    without = passes(x, weight, gradient, RECIPE)
    assert [torch.equal(mine, other) for mine, other in zip(found, without, strict=True)] == [True, True, False]


def test_a_backward_pass_in_two_computes_every_gradient_once(monkeypatch: pytest.MonkeyPatch):
    from titan_exp.parallel.pipeline_stage import BackwardSplit

    products = []
    original = module._multiply
    monkeypatch.setattr(module, "_multiply", lambda *args: products.append(1) or original(*args))
    x, weight = torch.randn(32, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    output = nvfp4_linear(x * 1, weight, None, RECIPE)
    split = BackwardSplit(output, x, [("weight", torch.nn.Parameter(weight))])
    gradient = split.compute_input_gradient(torch.ones_like(output))
    assert len(products) == 2, "forward, and the gradient of the input"
    whole = torch.autograd.grad(nvfp4_linear(x * 1, weight, None, RECIPE), x, torch.ones_like(output))[0]
    assert torch.equal(gradient, whole)


needs_kernels = pytest.mark.skipif(bool(torchao_violations("nvfp4")), reason="needs torchao's NVFP4 kernels")


@needs_kernels
def test_torchaos_kernels_take_what_they_are_given(monkeypatch: pytest.MonkeyPatch):
    """Shapes and types alone: the kernels run on Blackwell, where `test_on_cuda` holds them against the emulation."""
    pytest.importorskip("triton")
    # torchao defines its operators only where Triton has a GPU.
    for name in [name for name in sys.modules if name.startswith("torchao.prototype.moe_training.nvfp4_training")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "titan_exp.quantization.nvfp4_kernels", raising=False)
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    from titan_exp.quantization.nvfp4_kernels import nvfp4_native

    for stochastic in (False, True):
        with FakeTensorMode():
            x = torch.empty(2, 128, 256, dtype=torch.bfloat16, requires_grad=True)
            weight = torch.empty(512, 256, dtype=torch.bfloat16, requires_grad=True)
            output = nvfp4_native(x, weight, None, NVFP4(power_of_two=True, stochastic=stochastic))
            of_x, of_weight = torch.autograd.grad(output, [x, weight], torch.empty_like(output))
        assert (output.shape, of_x.shape, of_weight.shape) == ((2, 128, 512), x.shape, weight.shape)
        assert output.dtype == of_x.dtype == of_weight.dtype == torch.bfloat16


@needs_kernels
def test_the_path_of_the_instructions_pairs_numbers_with_their_scales(monkeypatch: pytest.MonkeyPatch):
    """With what torchao's kernels compute, by their documentation, in place of them: they run on Blackwell alone."""
    from titan_exp.quantization import nvfp4_kernels as instructions

    def tokens(rows: Tensor, of_columns: Tensor, of_rows: Tensor, signs: list[int], **_: object) -> tuple[Tensor, ...]:
        assert signs == list(SIGNS)
        none = torch.empty(0)
        return rounded(transformed(rows), of_columns / 2688), none, rounded(rows, of_rows / 2688), none

    def square(weight: Tensor, largest: Tensor) -> tuple[Tensor, ...]:
        codes = rounded(weight, largest / 2688, square=True)
        return codes, torch.empty(0), codes.t(), torch.empty(0)

    monkeypatch.setattr(
        instructions, "triton_rht_amax", lambda rows, _: (transformed(rows).abs().amax(), rows.abs().amax())
    )
    monkeypatch.setattr(instructions, "triton_rht_quantize_row_col", tokens)
    monkeypatch.setattr(instructions, "triton_weight_quantize_2d", square)
    monkeypatch.setattr(
        instructions, "_multiply", lambda left, right: (left[0] @ right[0].t() * left[2] * right[2]).bfloat16()
    )
    random = torch.Generator().manual_seed(0)
    x, weight, gradient = (
        (torch.randn(*shape, generator=random) * size).bfloat16()
        for shape, size in (((2, 32, 64), 1), ((48, 64), 1e-2), ((2, 32, 48), 1e-5))
    )
    expected = passes(x, weight, gradient, RECIPE)
    monkeypatch.setattr(sys.modules[__name__], "nvfp4_linear", instructions.nvfp4_native)
    for mine, their in zip(passes(x, weight, gradient, RECIPE), expected, strict=True):
        assert torch.equal(mine, their)
