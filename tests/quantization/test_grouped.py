"""The product of experts under each recipe is that of one projection, expert by expert, bit by bit."""

import importlib
import inspect
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.config.composing import experiment, llama
from tests.ranks import run_ranks
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.parallelism import BLOCK, QuantizationConfig
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.models.blocks.feed_forward import Experts, compute_locally
from titan_exp.models.blocks.linear import GroupedLinear, GroupedLinearImpl, Linear
from titan_exp.models.build import init_specs
from titan_exp.models.spec.lookup import model_spec
from titan_exp.ops.moe.grouped_mm import grouped_linear
from titan_exp.ops.moe.permutation import PaddedOrder
from titan_exp.ops.moe.routing import Routing
from titan_exp.quantization import grouped_kernels as grouped_instructions
from titan_exp.quantization import recipes as instructions
from titan_exp.quantization.float8 import Float8, amax_to_scale
from titan_exp.quantization.grouped import (
    EmulatedGroupedLinear,
    GroupedFloat8,
    GroupedMX,
    NativeGroupedLinear,
    grouped_linear_impl_for,
)
from titan_exp.quantization.mxfp8 import KernelPreference
from titan_exp.quantization.quantize import describe, quantize
from titan_exp.quantization.recipes import linear_impl_for

CPU = torch.device("cpu")
RECIPES = {
    "tensorwise": ["quantization=float8_tensorwise"],
    "tensorwise, any scale": ["quantization=float8_tensorwise", "quantization.power_of_two_scales=false"],
    "rowwise": ["quantization=float8_rowwise"],
    "rowwise, any scales": ["quantization=float8_rowwise", "quantization.power_of_two_scales=false"],
    "gw_hp": ["quantization=float8_rowwise_gw_hp"],
    "mx": ["quantization=mxfp8"],
    "nvfp4": ["quantization=nvfp4"],
    "nvfp4, any scales": ["quantization=nvfp4", "quantization.power_of_two_scales=false"],
}
WHOLE = (64, 64, 96, 192)
"""Whole blocks of every recipe, an expert without rows, and of 224 rows some that are nobody's."""
RAGGED = (7, 7, 83, 176)


def config_of(*overrides: str) -> QuantizationConfig:
    base = ["model=llama_debug", "training.seq_len=64", "cluster.device=cpu", "quantization.precomputed_scales=false"]
    return resolve_layout(experiment(*base, "quantization.float8_all_gather=false", *overrides), 1).quantization


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Channels of very different sizes, some of which underflow, and experts too."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(224, 96, generator=random) * torch.randn(96, generator=random).mul(3).exp()
    weight = torch.randn(4, 160, 96, generator=random) * torch.tensor([0.1, 1, 100, 1e-3])[:, None, None]
    gradient = torch.randn(224, 160, generator=random) * torch.logspace(-6, 0, 224)[:, None]
    return x.to(dtype), weight.to(dtype), gradient.to(dtype)


def passes(product, x: Tensor, weight: Tensor, gradient: Tensor, *of) -> list[Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    output = product(x, weight, *of)
    return [output.detach(), *torch.autograd.grad(output, [x, weight], gradient)]


def one_by_one(product, ends: tuple[int, ...], multiple: int, *tensors: Tensor) -> list[Tensor]:
    """Each expert's rows, and zeros up to a multiple, through the product of one projection."""
    x, weight, gradient = tensors
    output, of_x = torch.zeros_like(gradient), torch.zeros_like(x)
    of_weight, start = torch.zeros_like(weight), 0
    for expert, end in enumerate(ends):
        rows, zeros = slice(start, end), -(end - start) % multiple
        if end > start:
            mine, its = (F.pad(tensor[rows], (0, 0, 0, zeros)) for tensor in (x, gradient))
            found = passes(product, mine, weight[expert], its)
            output[rows], of_x[rows], of_weight[expert] = found[0][: end - start], found[1][: end - start], found[2]
        start = end
    return [output, of_x, of_weight]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_it_is_the_product_of_one_projection(name: str, dtype: torch.dtype):
    config, tensors = config_of(*RECIPES[name]), operands(dtype)
    product = grouped_linear_impl_for(config, emulated=True)
    for ends, multiple in ((WHOLE, 1), (RAGGED, 32)):
        found = passes(product, *tensors, torch.tensor(ends, dtype=torch.int32))
        expected = one_by_one(linear_impl_for(config, emulated=True), ends, multiple, *tensors)
        for mine, single in zip(found, expected, strict=True):
            assert mine.dtype == dtype
            if ends == WHOLE:
                assert torch.equal(mine, single)
            else:
                # Zeros beside them, rows are summed up in another order.
                torch.testing.assert_close(mine, single, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-5)
        exact = passes(grouped_linear, *tensors, torch.tensor(ends, dtype=torch.int32))
        assert not torch.equal(found[0], exact[0]), "nothing was rounded"


@pytest.mark.parametrize("name", RECIPES)
def test_rows_of_no_expert_are_neither_read_nor_written(name: str):
    product = grouped_linear_impl_for(config_of(*RECIPES[name]), emulated=True)
    x, weight, gradient = operands(torch.float32)
    ends = torch.tensor(RAGGED, dtype=torch.int32)
    clean = passes(product, x, weight, gradient, ends)
    x[176:], gradient[176:] = torch.nan, torch.inf
    dirty = passes(product, x, weight, gradient, ends)
    assert all(torch.equal(mine, other) for mine, other in zip(dirty, clean, strict=True))
    assert not dirty[0][176:].any()
    assert not dirty[1][176:].any()
    assert not dirty[2][1].any(), "an expert without rows"
    # What is not finite in an expert's rows is seen in them, and in no other's.
    for expert, (row, start, end) in {2: (10, 7, 83), 3: (175, 83, 176)}.items():
        broken = x.clone()
        broken[row] = torch.nan
        output, _, of_weight = passes(product, broken, weight, gradient, ends)
        assert not output[row].isfinite().any()
        assert not of_weight[expert].isfinite().all()
        others, other = [*range(start), *range(end, 224)], 5 - expert
        assert torch.equal(output[others], clean[0][others])
        assert torch.equal(of_weight[other], clean[2][other])


def compiled() -> dict[str, list[tuple[Tensor, Tensor]]]:
    found = {}
    ends = torch.tensor(RAGGED, dtype=torch.int32)
    for dtype, names in ((torch.bfloat16, RECIPES), (torch.float32, ("tensorwise", "mx", "nvfp4"))):
        x, weight, gradient = operands(dtype)
        for name in names:
            many = grouped_linear_impl_for(config_of(*RECIPES[name]), emulated=True)
            one = linear_impl_for(config_of(*RECIPES[name]), emulated=True)
            for product, of in ((many, (x, weight, gradient, ends)), (one, (x, weight[2], gradient))):
                if product is many or dtype == torch.float32:
                    torch.compiler.reset()
                    call = torch.compile(product, backend="aot_eager", fullgraph=True)
                    pairs = zip(passes(call, *of), passes(product, *of), strict=True)
                    found[f"{name}, {dtype}, {type(product).__name__}"] = list(pairs)
    return found


@pytest.mark.night
def test_every_recipe_is_compiled_as_one_graph():
    """In fp32 a product of one projection too, of rows: of what is not converted the compiler of torch 2.11 has lost
    the gradient."""
    [found] = run_ranks(1, compiled)
    assert len(found) == len(RECIPES) + 2 * 3
    for name, pairs in found.items():
        assert all(torch.equal(mine, eager) for mine, eager in pairs), name


def test_gradients_are_rounded_at_random_where_asked():
    product = grouped_linear_impl_for(
        config_of(*RECIPES["nvfp4"], "quantization.stochastic_rounding=true"), emulated=True
    )
    nearest = grouped_linear_impl_for(config_of(*RECIPES["nvfp4"]), emulated=True)
    of = (*operands(torch.float32), torch.tensor(WHOLE, dtype=torch.int32))
    torch.manual_seed(1)
    first, again = passes(product, *of), passes(product, *of)
    torch.manual_seed(1)
    repeated = passes(product, *of)
    assert torch.equal(first[0], passes(nearest, *of)[0])
    for which in (1, 2):
        assert not torch.equal(first[which], again[which])
        assert torch.equal(first[which], repeated[which])


def mixture(**options: int) -> nn.Module:
    from tests.models.own_experts import Mixture

    with torch.device("meta"):
        return Mixture(llama("model=llama_debug"), **options)


def taken(*overrides: str, device: torch.device = CPU) -> dict[str, GroupedLinearImpl]:
    """The products of experts after a recipe, by name."""
    model, config = mixture(), config_of(*overrides)
    quantize(model, config, layers=4, device=device)
    return {name: it.linear_impl for name, it in model.named_modules() if isinstance(it, GroupedLinear)}


def test_names_layers_and_sizes_are_left_out_as_of_projections():
    def emulated(*overrides: str) -> set[str]:
        found = taken("quantization=float8_rowwise", *overrides)
        assert len(found) == 8
        assert {type(implementation) for implementation in found.values()} <= {GroupedLinearImpl, EmulatedGroupedLinear}
        return {name for name, it in found.items() if isinstance(it, EmulatedGroupedLinear)}

    assert len(emulated()) == 8
    ends = emulated("quantization.high_precision_first=1", "quantization.high_precision_last=2")
    assert ends == {"blocks.1.experts.gate_up", "blocks.1.experts.down"}
    assert {name.split(".")[-1] for name in emulated("quantization.filter=['*.down']")} == {"gate_up"}
    assert emulated("quantization.smallest_gemm=65") == set()
    model = llama("model=llama_debug")
    assert len(emulated(f"quantization.smallest_gemm={min(model.dim, model.ffn_dim)}")) == 8
    assert {type(implementation) for implementation in taken("quantization=none").values()} == {GroupedLinearImpl}


def test_the_summary_counts_experts():
    said = describe(mixture(), config_of("quantization=mxfp8"), layers=4, device=CPU)
    assert said is not None
    assert said.startswith("mxfp8, emulated on cpu: 8 of 8 linear layers, ")
    with pytest.raises(UserError, match="no such linear layer"):
        describe(mixture(), config_of("quantization=mxfp8", "quantization.filter=['*.gate']"), layers=4, device=CPU)
    assert "experts=4, in_features=64" in str(mixture())
    table = init_specs(mixture())
    assert table is not None
    assert table["blocks.0.experts.down.weight"].kind == "normal"


@pytest.mark.parametrize(("recipe", "multiple"), BLOCK.items())
def test_dims_that_do_not_fit_are_refused(recipe: str, multiple: int):
    for inputs, outputs, dim in ((multiple, 3 * multiple + 8, "outputs"), (multiple + 8, multiple, "inputs")):
        model = nn.ModuleDict({"experts": GroupedLinear(2, inputs, outputs, 0.02)})
        with pytest.raises(UserError) as refused:
            quantize(model, config_of(f"quantization={recipe}"), layers=1, device=CPU)
        [violation] = refused.value.violations
        size = outputs if dim == "outputs" else inputs
        assert violation.reason == f"it needs multiples of {multiple}, and the experts of experts have {size} {dim}"
        assert "quantization.filter=['experts']" in violation.remedy
        left = config_of(f"quantization={recipe}", "quantization.filter=['experts']")
        quantize(model, left, layers=1, device=CPU)


def hopper(monkeypatch: pytest.MonkeyPatch, *capability: int) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    return torch.device("cuda", 0)


def test_torchao_s_kernels_are_taken_where_there_are_any(monkeypatch: pytest.MonkeyPatch):
    gpu, small = hopper(monkeypatch, 9, 0), "quantization.smallest_gemm=0"
    rowwise = taken("quantization=float8_rowwise", small, device=gpu)
    assert {type(implementation) for implementation in rowwise.values()} == {NativeGroupedLinear}
    for overrides in (
        ["quantization=float8_tensorwise"],
        ["quantization=float8_rowwise_gw_hp"],
        ["quantization=mxfp8"],
        ["quantization=float8_rowwise", "quantization.power_of_two_scales=false"],
        ["quantization=float8_rowwise", "quantization.emulate=true"],
    ):
        assert {type(implementation) for implementation in taken(*overrides, small, device=gpu).values()} == {
            EmulatedGroupedLinear
        }
    # Capability 12 has float8, and torch's grouped matmul of it is not for it.
    found = taken("quantization=float8_rowwise", small, device=hopper(monkeypatch, 12, 0))
    assert {type(implementation) for implementation in found.values()} == {EmulatedGroupedLinear}
    blackwell = hopper(monkeypatch, 10, 0)
    found = taken("quantization=mxfp8", small, device=blackwell)
    assert {type(implementation) for implementation in found.values()} == {EmulatedGroupedLinear}, (
        "torchao here is built without its kernels"
    )
    from torchao.prototype.moe_training import mxfp8_grouped_mm

    monkeypatch.setattr(mxfp8_grouped_mm, "_SM100_KERNELS_AVAILABLE", True)
    with pytest.raises(UserError, match=r"(?s)multiples of 128, and .*emulate=true, which takes multiples of 32"):
        taken("quantization=mxfp8", small, device=blackwell)


def test_what_must_not_be_emulated_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    gpu, never = hopper(monkeypatch, 9, 0), ["quantization.smallest_gemm=0", "cluster.device=cuda"]
    never.append("quantization.emulate=false")
    for recipe in ("float8_tensorwise", "float8_rowwise_gw_hp"):
        with pytest.raises(UserError, match=rf"no kernel here for the experts of blocks\.0\..* in {recipe}"):
            taken(f"quantization={recipe}", *never, device=gpu)
    with pytest.raises(UserError, match="float8_rowwise without power-of-two scales"):
        taken("quantization=float8_rowwise", "quantization.power_of_two_scales=false", *never, device=gpu)
    assert len(taken("quantization=float8_rowwise", *never, device=gpu)) == 8
    assert len(taken("quantization=float8_tensorwise", *never, "quantization.filter=['*.experts.*']", device=gpu)) == 8


def test_emulated_experts_are_named_beside_native_linears(monkeypatch: pytest.MonkeyPatch):
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.many = Linear(64, 64, 0.02), GroupedLinear(4, 64, 64, 0.02)

    config = config_of("quantization=float8_tensorwise", "quantization.smallest_gemm=0")
    said = describe(Both(), config, layers=1, device=hopper(monkeypatch, 9, 0))
    assert said is not None
    assert "by the instructions of cuda" in said
    assert "1 expert layer emulated, because torchao has no kernel for them here: 2 of 2 linear layers" in said


def test_torchao_s_functions_are_those_that_are_called():
    """A drift of private names and arguments is noticed here, not on a GPU."""
    expected = {
        "_to_fp8_rowwise_then_scaled_grouped_mm": {
            "A": inspect.Parameter.empty,
            "B_t": inspect.Parameter.empty,
            "offs": inspect.Parameter.empty,
            "out_dtype": torch.bfloat16,
            "float8_dtype": torch.float8_e4m3fn,
            "pad_token_groups_for_grouped_mm": True,
        },
        "_to_mxfp8_then_scaled_grouped_mm": {
            "A": inspect.Parameter.empty,
            "B_t": inspect.Parameter.empty,
            "offs": None,
            "bias": None,
            "out_dtype": torch.bfloat16,
            "kernel_preference": "auto",
            "wgrad_with_hp": False,
            "scale_calculation_mode": "rceil",
            "pad_token_groups_for_grouped_mm": False,
        },
    }
    for name, arguments in expected.items():
        found = inspect.signature(getattr(grouped_instructions, name)).parameters
        assert {key: getattr(it.default, "value", it.default) for key, it in found.items()} == arguments
    assert grouped_instructions.KERNELS.keys() == instructions.GROUPED_MULTIPLE.keys()


def test_mxfp8_is_torchao_s():
    x, weight, gradient = operands(torch.bfloat16)
    ends = torch.tensor((*WHOLE[:3], 224), dtype=torch.int32)

    def theirs(x: Tensor, weight: Tensor) -> Tensor:
        return grouped_instructions._to_mxfp8_then_scaled_grouped_mm(
            x, weight.mT, ends, kernel_preference=KernelPreference.EMULATED
        )

    found = passes(EmulatedGroupedLinear(GroupedMX()), x, weight, gradient, ends)
    for mine, their in zip(found, passes(theirs, x, weight, gradient), strict=True):
        assert torch.equal(mine, their)


def test_the_path_of_mxfp8_s_kernels_is_the_emulation(monkeypatch: pytest.MonkeyPatch):
    """torchao's own emulation in the place of its kernels, which run on Blackwell alone."""
    original = grouped_instructions._to_mxfp8_then_scaled_grouped_mm

    def theirs(rows: Tensor, weight: Tensor, offs: Tensor, **how: object) -> Tensor:
        sizes = offs.diff(prepend=offs.new_zeros(1))
        assert ((sizes > 0) & (sizes % 128 == 0)).all()
        assert len(rows) % 128 == 0
        return original(rows, weight, offs, kernel_preference=KernelPreference.EMULATED, **how)

    monkeypatch.setattr(grouped_instructions, "_to_mxfp8_then_scaled_grouped_mm", theirs)
    of = (*operands(torch.bfloat16), torch.tensor(RAGGED, dtype=torch.int32))
    found = passes(NativeGroupedLinear("mxfp8"), *of)
    for mine, emulated in zip(found, passes(EmulatedGroupedLinear(GroupedMX()), *of), strict=True):
        torch.testing.assert_close(mine, emulated, rtol=2**-7, atol=1e-6 * float(emulated.abs().max()))
    assert not found[0][176:].any()
    assert not found[1][176:].any()


def scaled_grouped_mm(  # torch's own arguments
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, offs: Tensor, **how: object
) -> Tensor:
    """torch's float8 grouped matmul, by its documentation: rows' scales of the one, columns' of the other."""
    assert how == {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    sizes = offs.diff(prepend=offs.new_zeros(1))
    assert ((sizes > 0) & (sizes % 16 == 0)).all()
    assert left.stride(-1) == 1
    assert right.stride(-2) == 1
    starts, experts = [0, *offs.tolist()], len(offs)
    if right.dim() == 3:
        output = torch.full((len(left), right.shape[2]), torch.nan)  # as memory may be
        for expert, rows in enumerate(map(slice, starts, starts[1:])):
            its = right[expert].float() * right_scale[expert]
            output[rows] = (left[rows].float() * left_scale[rows, None]) @ its
        return output.bfloat16()
    scales = left_scale.view(experts, -1, 1), right_scale.view(experts, 1, -1)
    products = [
        (left[:, rows].float() * scales[0][expert]) @ (right[rows].float() * scales[1][expert])
        for expert, rows in enumerate(map(slice, starts, starts[1:]))
    ]
    return torch.stack(products).bfloat16()


def replace_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchao's casts do, by its own references, and torch's matmul, by its documentation, in the place of what
    runs on GPUs alone."""
    from torchao.prototype.moe_training import fp8_grouped_mm as theirs
    from torchao.prototype.moe_training import utils

    def over(dim: int):
        def cast(tensor: Tensor, output_dtype: torch.dtype, round_scales_to_power_of_2: bool) -> tuple[Tensor, Tensor]:
            assert round_scales_to_power_of_2
            scale = amax_to_scale(tensor.abs().amax(dim, keepdim=True), output_dtype, True)
            data = (tensor.float() * scale).clamp(-448, 448).to(output_dtype)
            return data.mT.contiguous().mT if tensor.dim() == 3 else data, scale

        return cast

    def dual(first: Tensor, second: Tensor, offs: Tensor, dtype: torch.dtype, round_scales_to_power_of_2: bool):
        casts = []
        for tensor in (first, second):
            columns = tensor.t().contiguous().t()
            # Rows from the last end on, which are nobody's, are not part of its reference.
            casts += utils.torch_to_float8_per_group_colwise(columns, offs, dtype, round_scales_to_power_of_2)
        return casts

    monkeypatch.setattr(theirs, "triton_fp8_rowwise_2d_scale_and_cast", over(1))
    monkeypatch.setattr(theirs, "triton_fp8_colwise_3d_scale_and_cast", over(1))

    def right(tensor: Tensor, output_dtype: torch.dtype, round_scales_to_power_of_2: bool) -> tuple[Tensor, Tensor]:
        return utils.torch_to_3d_rowwise_float8_transpose_rhs(tensor, output_dtype, round_scales_to_power_of_2)

    monkeypatch.setattr(theirs, "triton_fp8_rowwise_3d_transpose_rhs", right)
    monkeypatch.setattr(theirs, "triton_fp8_per_group_colwise_scales_dual", dual)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled_grouped_mm)


def test_the_path_of_float8_s_kernels_is_the_emulation(monkeypatch: pytest.MonkeyPatch):
    replace_kernels(monkeypatch)
    recipe = GroupedFloat8(Float8(True, False, power_of_two=True, emulated=True))
    for dtype in (torch.bfloat16, torch.float32):
        of = (*operands(dtype), torch.tensor(RAGGED, dtype=torch.int32))
        found = passes(NativeGroupedLinear("float8_rowwise"), *of)
        for mine, emulated in zip(found, passes(EmulatedGroupedLinear(recipe), *of), strict=True):
            assert mine.dtype == dtype
            if dtype == torch.bfloat16:
                torch.testing.assert_close(mine, emulated, rtol=2**-7, atol=1e-6 * float(emulated.abs().max()))
            else:  # outputs and their gradients go through bf16, where the latter may come to another float8 number
                assert (mine - emulated).norm() < 5e-2 * emulated.norm()
        assert not found[0][176:].any()
        assert not found[1][176:].any()


def test_tokens_cast_to_their_rows_are_rows_cast(monkeypatch: pytest.MonkeyPatch):
    replace_kernels(monkeypatch)
    native = NativeGroupedLinear("float8_rowwise")
    x, weight, gradient = operands(torch.bfloat16)
    experts = torch.rand(56, 3, generator=torch.Generator().manual_seed(0)).argsort(-1)[:, :2]  # the last gets none
    order = PaddedOrder.sort(experts, 4, native.row_multiple)
    upstream = gradient[: len(order.order)].index_fill(0, order.padding, 0)
    filled = upstream.new_zeros(len(order.order), dtype=torch.bool).index_fill(0, order.inverse.flatten(), True)
    found = passes(native.of_tokens, x[:56], weight, upstream, order)
    expected = passes(partial(GroupedLinearImpl.of_tokens, native), x[:56], weight, upstream, order)
    assert torch.equal(found[0][filled], expected[0][filled])
    assert all(map(torch.equal, found[1:], expected[1:]))


@pytest.mark.parametrize("weighted_inputs", [False, True])
def test_rows_are_padded_once_for_both_matmuls(monkeypatch: pytest.MonkeyPatch, weighted_inputs: bool):
    replace_kernels(monkeypatch)
    spec = model_spec(experiment("model=qwen3_moe_debug").model)
    assert spec is not None
    layer = spec.layers[0]
    experts = Experts(layer).bfloat16()
    experts.weighted_inputs = weighted_inputs
    random = torch.Generator().manual_seed(0)
    for linear in (experts.gate_up, experts.down):
        linear.linear_impl = NativeGroupedLinear("float8_rowwise")
        torch.nn.init.normal_(linear.weight, generator=random)
    tokens = torch.randn(29, experts.gate_up.in_features, generator=random).bfloat16()
    weights = torch.rand(29, 2, generator=random)
    routing = Routing(torch.rand(29, experts.count - 1, generator=random).argsort(-1)[:, :2], weights)
    gradient = torch.randn(tokens.shape, generator=random).bfloat16()

    def gradients() -> list[Tensor]:
        leaves = [tokens.clone().requires_grad_(), weights.clone().requires_grad_(), *experts.parameters()]
        out = compute_locally(leaves[0], Routing(routing.experts, leaves[1]), experts)
        return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]

    found = gradients()
    monkeypatch.setattr(Experts, "row_multiple", 1)
    assert all(map(torch.equal, found, gradients()))


def test_kernels_that_cannot_be_imported_are_named(monkeypatch: pytest.MonkeyPatch):
    name = grouped_instructions.__name__
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao.prototype.moe_training", None)
    with pytest.raises(UserError, match="expert kernels of torchao"):
        importlib.import_module(name)
