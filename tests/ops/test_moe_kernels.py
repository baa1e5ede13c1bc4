"""Triton kernels of experts against torch's operators, and SwiGLU with weights against its definition."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.interpreted import DEVICES, needs_triton, run_kernels
from titan_exp.ops.moe.grouped_mm import grouped_linear, weighted_swiglu_linear
from titan_exp.ops.swiglu import swiglu, weighted_swiglu

Results = dict[str, tuple[Tensor, Tensor]]
"""Tensors of the kernel and of torch's operators, by case."""


def both_ways(module: Any, device: str, call: Callable[[], dict[str, Tensor]]) -> Results:
    """Results of a call with kernels, which a CPU interprets, and with torch's operators."""
    chosen = module.runs_kernel
    try:
        if device == "cpu":
            module.runs_kernel = lambda _: True
        ours = call()
        module.runs_kernel = lambda _: False
        return {name: (found.cpu(), ours[name].cpu()) for name, found in call().items()}
    finally:
        module.runs_kernel = chosen


def padded(experts: Tensor, x: Tensor, weights: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    """Copies with zeros between them, and gradients, of tokens with `weights` for nine experts."""
    from titan_exp.ops.moe.permutation import PaddedOrder, combine, permute

    order = PaddedOrder.sort(experts, 9, 4)
    leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
    copies = permute(leaves[0], order.order, order.inverse, order.padding)
    assert not copies[order.padding].any()
    rows = copies.detach().requires_grad_()
    sums = combine(rows, order.order, order.inverse, leaves[1], order.padding)
    (rows_grad,) = torch.autograd.grad(sums, rows, gradient)
    assert not rows_grad[order.padding].any()
    (plain_grad,) = torch.autograd.grad(combine(rows, order.order, order.inverse, None, order.padding), rows, gradient)
    assert not plain_grad[order.padding].any()
    return {
        f"{weights.shape[1]}, padded {name}": part.detach()
        for name, part in zip(("copies", "gradient 0", "plain gradient"), (copies, rows_grad, plain_grad), strict=True)
    }


def permutations(device: str) -> Results:
    """Columns that fill no program, choices that are not a power of two, upstream gradients in other layouts."""
    from titan_exp.ops.moe import permutation as module

    if device == "cpu":
        module.BLOCK, module.TILE = 32, 64

    def call() -> dict[str, Tensor]:
        found = {}
        for dtype, tokens, k, dim in ((torch.bfloat16, 7, 3, 75), (torch.float32, 5, 4, 32), (torch.float16, 3, 1, 8)):
            random = torch.Generator().manual_seed(dim)
            experts = torch.rand(tokens, 9, generator=random).argsort(-1)[:, :k].to(device)
            order, inverse, _ = module.sort_by_expert(experts, 9)
            x, rows = (torch.randn(count, dim, generator=random).to(device, dtype) for count in (tokens, tokens * k))
            weights = torch.rand(k, tokens, generator=random).to(device).t()
            gradients = [torch.randn(dim, len(tensor), generator=random).to(device, dtype).t() for tensor in (rows, x)]
            found |= padded(experts, x, weights, gradients[1]) if k == 3 else {}
            leaves = x.requires_grad_(), rows.requires_grad_(), weights.requires_grad_()
            copies = module.permute(x, order, inverse)
            (found[f"{k}, copies' gradient"],) = torch.autograd.grad(copies, x, gradients[0])
            for factors in (weights, None):
                name = f"{k}, {'plain' if factors is None else 'weighted'} sums"
                sums = module.combine(rows, order, inverse, factors)
                wanted = leaves[1:] if factors is not None else leaves[1:2]
                parts = torch.autograd.grad(sums, wanted, gradients[1])
                found |= {f"{name}' gradient {place}": part for place, part in enumerate(parts)}
                found[name] = sums.detach()
            found[f"{k}, copies"] = copies.detach()
        nothing = torch.empty(0, 2, dtype=torch.int64, device=device), torch.empty(0, 75, device=device)
        order, inverse, _ = module.sort_by_expert(nothing[0], 9)
        assert module.combine(module.permute(nothing[1], order, inverse), order, inverse, inverse.float()).numel() == 0
        return found

    return both_ways(module, device, call)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_copies_sums_and_their_gradients_are_those_of_torch(device: str):
    [found] = run_kernels(1, device, permutations)
    assert len(found) == 24
    for name, (theirs, ours) in found.items():
        assert ours.dtype == theirs.dtype, name
        if "weighted" not in name or name.endswith("gradient 0"):
            assert torch.equal(ours, theirs), name
        elif name.endswith("gradient 1"):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=name)
        else:
            # A multiply-add in fp32 rounds once or twice.
            tolerance = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2e-6}[ours.dtype]
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=1e-6, msg=name)
            assert ours.dtype == torch.float32 or (ours != theirs).float().mean() < 0.02, name


def cast(device: str) -> Results:
    """Rows of zeros, of powers of two, of tiny and of huge numbers; columns that fill no program."""
    from titan_exp.ops import float8 as module
    from titan_exp.ops.moe.permutation import PaddedOrder

    module.BLOCK = 32 if device == "cpu" else module.BLOCK

    def call() -> dict[str, Tensor]:
        found = {}
        for dtype, k in ((torch.bfloat16, 3), (torch.float32, 1)):
            random = torch.Generator().manual_seed(k)
            x = torch.randn(9, 80, generator=random) * torch.logspace(-30, 30, 9)[:, None]
            x[3], x[4, :2] = 0, torch.tensor([2.0**8, 7 * 2.0**6])
            order = PaddedOrder.sort(torch.rand(9, 5, generator=random).argsort(-1)[:, :k].to(device), 5, 4)
            x = x.to(device, dtype)
            rows, scales = module.cast_tokens(x, order.inverse, order.padding)
            copies = x[order.order // k].index_fill(0, order.padding, 0)
            found |= {f"{k} rows": rows.float(), f"{k} scales": scales, f"{k} copies": copies}
        return found

    return both_ways(module, device, call)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_tokens_are_cast_as_torchao_casts_their_rows(device: str):
    from titan_exp.quantization.float8 import amax_to_scale, to_fp8_saturated

    [found] = run_kernels(1, device, cast)
    assert len(found) == 6
    for k in (3, 1):
        copies = found[f"{k} copies"][0]
        scale = amax_to_scale(copies.abs().amax(1), torch.float8_e4m3fn, True)
        expected = to_fp8_saturated(copies.float() * scale[:, None], torch.float8_e4m3fn).float()
        assert expected.unique().numel() > 50
        for rows, scales in zip(found[f"{k} rows"], found[f"{k} scales"], strict=True):
            assert torch.equal(scales, scale)
            assert torch.equal(rows, expected)


def zeroed(device: str) -> Results:
    """More and fewer rows after the last end than programs, and none."""
    from titan_exp.ops.moe import grouped_mm as module

    module.PROGRAMS = 4 if device == "cpu" else module.PROGRAMS

    def call() -> dict[str, Tensor]:
        found = {}
        for end in (0, 3, 10, 13):
            rows = torch.full((13, 1030), torch.nan, dtype=torch.bfloat16, device=device)
            rows[:end] = 1
            module._zero_rows_after(rows, torch.tensor([0, end], dtype=torch.int32, device=device))
            found[str(end)] = rows
        return found

    return both_ways(module, device, call)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_no_expert_are_zeroed(device: str):
    [found] = run_kernels(1, device, zeroed)
    for end, results in found.items():
        for rows in results:
            assert (rows[: int(end)] == 1).all(), end
            assert not rows[int(end) :].any(), end


def test_weighted_swiglu_is_swiglu_times_weights():
    x = torch.randn(5, 16, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(5, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(weighted_swiglu(x, weights, 4), swiglu(x[None], 4)[0] * weights[:, None])
    assert torch.autograd.gradcheck(lambda x, weights: weighted_swiglu(x, weights, 4), (x, weights))
    assert torch.autograd.gradcheck(lambda x, weights: weighted_swiglu(x[:0], weights[:0], 4), (x, weights))


def test_gradients_of_rows_and_matrices_may_come_apart():
    """Zero-bubble schedules ask for them one after the other; layers may be frozen."""
    gate_up, weight, row_weights = leaves = [
        torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((7, 16), (3, 6, 8), (7,))
    ]
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    out = weighted_swiglu_linear(gate_up, weight, row_weights, ends, 4)
    plain = grouped_linear(weighted_swiglu(gate_up, row_weights, 4), weight, ends)
    assert torch.equal(out, plain)
    upstream = torch.randn_like(out)
    expected = torch.autograd.grad(plain, leaves, upstream)
    for wanted in ((0, 1, 2), (0, 2), (1,), (2,)):
        found = torch.autograd.grad(out, [leaves[place] for place in wanted], upstream, retain_graph=True)
        for place, gradient in zip(wanted, found, strict=True):
            torch.testing.assert_close(gradient, expected[place])
    only = weighted_swiglu_linear(gate_up.detach(), weight.detach(), row_weights, ends, 4)
    torch.testing.assert_close(torch.autograd.grad(only, row_weights, upstream)[0], expected[2])


def test_weighted_swiglu_is_rounded_once():
    x, weights = torch.randn(64, 32).bfloat16().requires_grad_(), torch.rand(64).requires_grad_()
    gate, up = x.detach().unflatten(-1, (-1, 2, 4)).unbind(-2)
    silu = torch.nn.functional.silu(gate)
    out = weighted_swiglu(x, weights, 4)
    exact = (silu.float() * up.float() * weights.detach()[:, None, None]).flatten(-2)
    assert torch.equal(out, exact.bfloat16())
    gradient = torch.randn(64, 16).bfloat16()
    _, weights_grad = torch.autograd.grad(out, (x, weights), gradient)
    assert weights_grad.dtype == torch.float32
    expected = (gradient.double() * (silu.double() * up.double()).flatten(-2)).sum(-1)
    torch.testing.assert_close(weights_grad.double(), expected, rtol=1e-5, atol=1e-5)


def test_swiglu_takes_rows_without_a_batch():
    x = torch.randn(5, 16, dtype=torch.float64, requires_grad=True)
    assert torch.equal(swiglu(x, 4), swiglu(x[None], 4)[0])
    assert swiglu(x[:0], 4).shape == (0, 8)
    assert torch.autograd.grad(swiglu(x[:0], 4).sum(), x)[0].shape == x.shape
