"""The product of experts against a loop in fp64, its gradients against finite differences; no rows, and nobody's."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.ranks import run_ranks
from titan_exp.ops.moe import grouped_mm as module
from titan_exp.ops.moe.grouped_mm import grouped_linear
from titan_exp.ops.moe.permutation import TokenPadding, experts_of_rows
from titan_exp.plan.fake_kernels import fake_cuda_kernels

ENDS = {
    "uneven": [5, 6, 17, 20],
    "none at the beginning": [0, 0, 9, 20],
    "none in between": [7, 7, 7, 20],
    "none at the end, and nobody's": [3, 14, 14, 14],
    "all nobody's": [0, 0, 0, 0],
}


def ends_of(*ends: int) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def by_mask(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Every row by every expert, in one product, of which a mask leaves the one."""
    expert = torch.searchsorted(ends, torch.arange(len(x), dtype=ends.dtype), right=True)
    every = torch.einsum("ti,eoi->teo", x, weight)
    return (every * F.one_hot(expert, len(ends) + 1)[:, :-1, None]).sum(1)


def passes(product, x: Tensor, weight: Tensor, ends: Tensor, gradient: Tensor) -> list[Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    output = product(x, weight, ends)
    return [output.detach(), *torch.autograd.grad(output, [x, weight], gradient)]


def operands(dtype: torch.dtype, *, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    x, weight, gradient = (torch.randn(*size, generator=random) for size in ((20, 16), (4, 24, 16), (20, 24)))
    return x.to(device, dtype), weight.to(device, dtype), gradient.to(device, dtype)


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_it_is_each_expert_s_product(name: str, dtype: torch.dtype, error: float):
    x, weight, gradient = operands(dtype)
    ends = ends_of(*ENDS[name])
    found = passes(grouped_linear, x, weight, ends, gradient)
    expected = passes(by_mask, x.double(), weight.double(), ends, gradient.double())
    for mine, exact in zip(found, expected, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), exact, rtol=error, atol=error * 8)


@pytest.mark.parametrize("name", ENDS)
def test_gradients_are_finite_differences(name: str):
    x, weight, _ = operands(torch.float64)
    x, weight = x[:, :5].clone().requires_grad_(), weight[:, :3, :5].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, weight: grouped_linear(x, weight, ends_of(*ENDS[name])), (x, weight))


def test_rows_of_no_expert_are_neither_read_nor_written():
    x, weight, gradient = operands(torch.float32)
    ends = ends_of(3, 3, 9, 14)
    clean = passes(grouped_linear, x, weight, ends, gradient)
    x[14:], gradient[14:] = torch.nan, torch.inf
    dirty = passes(grouped_linear, x, weight, ends, gradient)
    assert all(torch.equal(mine, other) for mine, other in zip(dirty, clean, strict=True))
    assert not dirty[0][14:].any()
    assert not dirty[1][14:].any()
    assert not dirty[2][1].any(), "an expert without rows"


def test_no_rows_at_all():
    x, weight, gradient = operands(torch.float32)
    output, of_x, of_weight = passes(grouped_linear, x[:0], weight, ends_of(0, 0, 0, 0), gradient[:0])
    assert (output.shape, of_x.shape) == ((0, 24), (0, 16))
    assert torch.equal(of_weight, torch.zeros_like(weight))


@pytest.mark.parametrize("ends", [(5, 4, 17, 20), (5, 6, 17, 21), (-1, 6, 17, 20)])
def test_invalid_ends_are_an_error(ends: tuple[int, ...]):
    x, weight, _ = operands(torch.float32)
    with pytest.raises(ValueError, match=r"must be between \d+ and 20"):
        grouped_linear(x, weight, ends_of(*ends))


def test_types_and_shapes_are_checked_where_they_are_annotated():
    x, weight, _ = operands(torch.float32)
    for bad in (ends_of(5, 20), ends_of(5, 6, 17, 20).long()):
        with pytest.raises(Exception, match="Type-check error"):
            grouped_linear(x, weight, bad)


def test_only_gradients_that_are_wanted_are_computed(monkeypatch: pytest.MonkeyPatch):
    called = []
    for name in ("grouped_rows", "grouped_outer"):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, of=original, said=name: called.append(said) or of(*args))
    x, weight, gradient = operands(torch.float32)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    output = grouped_linear(x * 1, weight, ends_of(*ENDS["uneven"]))
    torch.autograd.grad(output, weight, gradient, retain_graph=True)
    assert called == ["grouped_rows", "grouped_outer"]
    called.clear()
    torch.autograd.grad(output, x, gradient)
    assert called == ["grouped_rows"]


def compiled() -> list[tuple[list[Tensor], list[Tensor]]]:
    x, weight, gradient = operands(torch.float32)
    call, found = torch.compile(grouped_linear, backend="aot_eager", fullgraph=True), []
    for name in ("uneven", "none in between", "none at the end, and nobody's"):
        ends = ends_of(*ENDS[name])
        found.append((passes(call, x, weight, ends, gradient), passes(grouped_linear, x, weight, ends, gradient)))
    return found


def test_it_is_compiled_as_one_graph():
    # In a process where shapes are not checked: the compiler cannot look through what does.
    [found] = run_ranks(1, compiled)
    assert len(found) == 3
    for mine, expected in found:
        assert all(torch.equal(it, other) for it, other in zip(mine, expected, strict=True))


def test_operators_keep_what_they_promise_the_compiler():
    x, weight, gradient = operands(torch.float32)
    ends = ends_of(*ENDS["none at the end, and nobody's"])
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.titan_exp.grouped_rows.default, (x, weight.mT, ends), test_utils=checks)
    torch.library.opcheck(torch.ops.titan_exp.grouped_outer.default, (gradient, x, ends), test_utils=checks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["meta", "fake", "fake CUDA"])
def test_shapes_are_known_without_numbers(device: str, dtype: torch.dtype):
    def shapes() -> list[tuple[int, ...]]:
        where = "meta" if device == "meta" else "cpu"
        x = torch.empty(20, 16, device=where, dtype=dtype, requires_grad=True)
        weight = torch.empty(4, 24, 16, device=where, dtype=dtype, requires_grad=True)
        output = grouped_linear(x, weight, torch.empty(4, dtype=torch.int32, device=where))
        return [tuple(tensor.shape) for tensor in (output, *torch.autograd.grad(output.sum(), [x, weight]))]

    if device == "meta":
        found = shapes()
    else:
        with FakeTensorMode(), fake_cuda_kernels() if device == "fake CUDA" else nullcontext():
            found = shapes()
    assert found == [(20, 24), (20, 16), (4, 24, 16)]


def test_upstream_gradients_may_have_any_strides():
    x, weight, gradient = operands(torch.float32)
    ends = ends_of(*ENDS["none in between"])
    for strided in (gradient.t().contiguous().t(), gradient[:1, :1].expand(20, 24)):
        found = passes(grouped_linear, x, weight, ends, strided)
        expected = passes(grouped_linear, x, weight, ends, strided.contiguous())
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_torch_s_kernel_is_handed_what_it_takes(monkeypatch: pytest.MonkeyPatch):
    """torch computes its grouped matmul on a CPU as well, with the same checks of shapes and strides; and leaves in
    nobody's rows whatever was there."""
    calls = []
    original = F.grouped_mm

    def with_rubbish(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        calls.append((left.dim(), right.dim()))
        product = original(left, right, offs=offs)
        if right.dim() == 3:
            product[int(offs[-1]) :] = torch.nan
        return product

    monkeypatch.setattr(module, "_has_kernel", lambda *_: True)
    monkeypatch.setattr(F, "grouped_mm", with_rubbish)
    x, weight, gradient = operands(torch.bfloat16)
    for ends in ENDS.values():
        found = passes(grouped_linear, x, weight, ends_of(*ends), gradient)
        exact = passes(by_mask, x.double(), weight.double(), ends_of(*ends), gradient.double())
        for mine, other in zip(found, exact, strict=True):
            torch.testing.assert_close(mine.double(), other, rtol=2e-2, atol=0.2)
    assert calls[:3] == [(2, 3), (2, 3), (2, 2)]
    spread = torch.ones((), dtype=torch.bfloat16).expand(20, 24)
    passes(grouped_linear, x.t().contiguous().t(), weight, ends_of(*ENDS["uneven"]), spread)


@pytest.mark.parametrize("multiple", [1, 4, 16])
@pytest.mark.parametrize("name", ENDS)
def test_rows_are_moved_to_whole_groups_and_back(name: str, multiple: int):
    x = torch.arange(1.0, 21)[:, None] * torch.tensor([1.0, -1.0])
    ends = ends_of(*ENDS[name])
    aligned = TokenPadding.of(ends, 20, multiple)
    spread = aligned.spread(x)
    sizes = aligned.ends.diff(prepend=ends_of(0))
    assert aligned.ends.dtype == torch.int32
    assert ((sizes > 0) & (sizes % multiple == 0)).all()
    assert aligned.ends[-1] <= len(spread)
    assert len(spread) % multiple == 0
    start = 0
    for expert, (end, after) in enumerate(zip(ENDS[name], aligned.ends.tolist(), strict=True)):
        begin = after - int(sizes[expert])
        assert torch.equal(spread[begin : begin + end - start], x[start:end])
        assert not spread[begin + end - start : after].any()
        assert (aligned.expert[begin:after] == expert).all()
        start = end
    back = aligned.collect(spread + 0)
    assert torch.equal(back[:start], x[:start])
    assert not back[start:].any()


def test_moving_is_differentiable():
    x = torch.randn(20, 3, dtype=torch.float64, requires_grad=True)
    aligned = TokenPadding.of(ends_of(3, 3, 9, 14), 20, 4)
    room = torch.randn(len(aligned.source), 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(aligned.spread, x)
    assert torch.autograd.gradcheck(aligned.collect, room)
    none = TokenPadding.of(ends_of(0, 0), 0, 4)
    assert none.collect(none.spread(x[:0])).shape == (0, 3)
    assert experts_of_rows(ends_of(3, 3, 9), 10).tolist() == [0] * 3 + [2] * 6 + [3]


def moved(x: Tensor, chosen: Tensor) -> Tensor:
    """Padded rows of the chosen ones, of whose number compiled code knows nothing."""
    rows, ends = x[chosen.nonzero().squeeze(1)], chosen.sum(dtype=torch.int32)[None]
    return TokenPadding.of(ends, rows.shape[0], 4).spread(rows)


def moved_both_ways(received: int) -> list[tuple[Tensor, Tensor]]:
    """Padded rows and gradients of eager and of compiled code."""
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    compiled, found = torch.compile(moved, backend="aot_eager", fullgraph=True), []
    for function in (moved, compiled):
        x = torch.arange(24.0).view(8, 3).requires_grad_()
        rows = function(x, torch.arange(8) < received)
        (rows * torch.arange(1.0, 4.0)).sum().backward()
        assert x.grad is not None
        found.append((rows.detach(), x.grad))
    return found


@pytest.mark.parametrize("received", [0, 5])
def test_compiled_code_moves_rows_whose_number_is_unknown(received: int):
    """As ranks of experts receive them. In a process without checks of shapes, which no compiler could follow."""
    ((eager, compiled),) = run_ranks(1, moved_both_ways, received)
    for expected, found in zip(eager, compiled, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ENDS)
def test_on_cuda(name: str, dtype: torch.dtype):
    x, weight, gradient = operands(dtype, device="cuda")
    ends = ends_of(*ENDS[name]).cuda()
    found = passes(grouped_linear, x, weight, ends, gradient)
    expected = passes(by_mask, x.cpu().double(), weight.cpu().double(), ends.cpu(), gradient.cpu().double())
    for mine, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.cpu().double(), exact, rtol=2e-2, atol=0.2)
