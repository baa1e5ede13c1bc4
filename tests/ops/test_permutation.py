"""Rows to experts and back: against loops in Python, finite differences, and sums whose order shows."""

from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from tests.ranks import run_ranks
from titan_exp.ops import float8  # noqa: F401  # registers cast_tokens
from titan_exp.ops.autograd import recompute_input
from titan_exp.ops.moe.grouped_mm import grouped_linear, weighted_swiglu_linear
from titan_exp.ops.moe.permutation import PaddedOrder, combine, permute, permute_weights, sort_by_expert
from titan_exp.ops.swiglu import swiglu


def drawn(tokens: int, k: int, experts: int, *, among: int | None = None) -> Tensor:
    """Distinct experts of each token, drawn from the first `among`."""
    random = torch.Generator().manual_seed(tokens + 10 * k + experts)
    return torch.rand(tokens, among or experts, generator=random).argsort(-1)[:, :k]


CHOICES = {
    "uneven": (drawn(13, 3, 5), 5),
    "some experts get none": (drawn(7, 2, 9, among=4) + 3, 9),
    "one expert gets all": (torch.full((6, 1), 2), 4),
    "the last expert gets all": (torch.full((6, 1), 3), 4),
    "one choice": (drawn(11, 1, 3), 3),
    "as many choices as experts": (drawn(5, 4, 4), 4),
    "one token": (drawn(1, 2, 3), 3),
    "no tokens": (torch.empty(0, 2, dtype=torch.int64), 3),
    "more experts than int16 counts": (drawn(4, 2, 5) + 40_000, 40_005),
}


def operands(tokens: int, k: int, dim: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, weights and a gradient of the sum."""
    random = torch.Generator().manual_seed(dim)
    rows, gradient = (torch.randn(count, dim, generator=random).to(dtype) for count in (tokens * k, tokens))
    return rows, torch.rand(tokens, k, generator=random).to(torch.promote_types(dtype, torch.float32)), gradient


@pytest.mark.parametrize("name", CHOICES)
def test_choices_are_sorted_by_expert_then_token(name: str):
    experts, count = CHOICES[name]
    order, inverse, ends = sort_by_expert(experts, count)
    flat = experts.flatten().tolist()
    assert order.tolist() == sorted(range(len(flat)), key=flat.__getitem__)
    assert torch.equal(order[inverse.flatten()], torch.arange(len(flat)))
    assert inverse.shape == experts.shape
    assert ends.dtype == torch.int32
    assert torch.equal(ends, torch.bincount(experts.flatten(), minlength=count).cumsum(0))


def test_choices_of_no_expert_come_last():
    order, inverse, ends = sort_by_expert(torch.tensor([[3, 1], [0, 3], [1, 5]]), 3)
    assert order.tolist() == [2, 1, 4, 0, 3, 5]
    assert inverse.tolist() == [[3, 1], [0, 4], [2, 5]]
    assert ends.tolist() == [1, 3, 3]


def test_padded_orders_have_whole_multiples_of_rows():
    for count, k, multiple in ((5, 2, 4), (3, 1, 16), (4, 3, 1)):
        experts = torch.rand(11, count).argsort(-1)[:, :k].clamp(max=count - 2)
        order, _, ends = sort_by_expert(experts, count)
        padded = PaddedOrder.sort(experts, count, multiple)
        source, expected = order.tolist(), list[int | None]()
        for start, end in pairwise([0, *ends.tolist()]):
            expected += source[start:end]
            expected += [None] * (-(end - start) % multiple or (multiple if start == end else 0))
        assert padded.ends[-1] == len(expected)
        assert (padded.ends.diff(prepend=padded.ends.new_zeros(1)) % multiple == 0).all()
        rows = [None if row in padded.padding else choice for row, choice in enumerate(padded.order.tolist())]
        assert rows == expected + [None] * (len(rows) - len(expected))
        assert padded.order[padded.inverse].flatten().tolist() == list(range(11 * k))


@pytest.mark.parametrize("name", CHOICES)
def test_rows_are_those_of_their_tokens_and_sums_those_of_their_rows(name: str):
    experts, count = CHOICES[name]
    order, inverse, _ = sort_by_expert(experts, count)
    tokens, k = experts.shape
    rows, weights, x = operands(tokens, k, 5)
    assert permute(x, order, inverse).tolist() == [x[choice // k].tolist() for choice in order.tolist()]
    assert permute_weights(weights, order, inverse).tolist() == [weights.flatten()[i].item() for i in order]
    for factors in (weights, None):
        found = combine(rows, order, inverse, factors)
        assert found.shape == x.shape
        for token in range(tokens):
            expected = torch.zeros(5, dtype=torch.float64)
            for row, choice in enumerate(order.tolist()):
                if choice // k == token:
                    expected += rows[row] * (1 if factors is None else factors[token, choice % k])
            torch.testing.assert_close(found[token], expected)


@pytest.mark.parametrize("name", CHOICES)
def test_gradients_are_finite_differences(name: str):
    experts, count = CHOICES[name]
    order, inverse, _ = sort_by_expert(experts, count)
    tokens, k = experts.shape
    rows, weights, x = (tensor.requires_grad_() for tensor in operands(tokens, k, 3))
    assert torch.autograd.gradcheck(lambda x: permute(x, order, inverse), x)
    assert torch.autograd.gradcheck(lambda weights: permute_weights(weights, order, inverse), weights)
    assert torch.autograd.gradcheck(
        lambda *operands: combine(operands[0], order, inverse, operands[1]), (rows, weights)
    )
    assert torch.autograd.gradcheck(lambda rows: combine(rows, order, inverse, None), rows)


def in_order(rows: Tensor, inverse: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum of each token's rows in fp32, one choice after the other, rounded once."""
    total = torch.zeros(inverse.shape[0], rows.shape[1])
    for choice in range(inverse.shape[1]):
        part = rows[inverse[:, choice]].float()
        total = total + (part if weights is None else part * weights[:, choice, None])
    return total.to(rows.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_in_fp32_in_the_order_of_choices(dtype: torch.dtype):
    experts = drawn(40, 8, 12)
    order, inverse, _ = sort_by_expert(experts, 12)
    # Large numbers that cancel: what is added before and between them is lost, in part.
    sizes = torch.tensor([1.0, 2.0**26, 3.0, -(2.0**26), 0.5, 2.0**12, 2.0**-14, -(2.0**12)])
    rows = (sizes.repeat(40)[order, None] * torch.arange(1, 7)).to(dtype)
    weights = (2.0 ** torch.arange(40))[:, None].expand(-1, 8)
    assert torch.equal(combine(rows, order, inverse, None), in_order(rows, inverse))
    assert torch.equal(combine(rows, order, inverse, weights), in_order(rows, inverse, weights))
    assert not torch.equal(in_order(rows, inverse.flip(1)), in_order(rows, inverse)), "the order shows"
    x = torch.zeros(40, 6, dtype=dtype, requires_grad=True)
    (x_grad,) = torch.autograd.grad(permute(x, order, inverse), x, rows)
    assert torch.equal(x_grad, in_order(rows, inverse))


def test_gradients_of_narrow_rows_are_rounded_once():
    experts = drawn(64, 4, 8)
    order, inverse, _ = sort_by_expert(experts, 8)
    rows, weights, gradient = operands(64, 4, 32, torch.bfloat16)
    leaves = rows.requires_grad_(), weights.requires_grad_()
    rows_grad, weights_grad = torch.autograd.grad(combine(leaves[0], order, inverse, leaves[1]), leaves, gradient)
    upstream = gradient.float()[order // 4]
    assert torch.equal(rows_grad, (upstream * weights.flatten()[order, None]).bfloat16())
    exact = (upstream.double() * rows.double()).sum(-1)[inverse]
    assert weights_grad.dtype == torch.float32
    torch.testing.assert_close(weights_grad.double(), exact, rtol=1e-5, atol=1e-5)


def experts_loop(x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Mixture of experts by definition: each expert's feed-forward of its tokens, times their weights."""
    out = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        token, choice = (experts == expert).nonzero(as_tuple=True)
        hidden = swiglu(F.linear(x[token], gate_up[expert])[None], 4)[0]
        out = out.index_add(0, token, F.linear(hidden, down[expert]) * weights[token, choice, None])
    return out


def experts_by_rows(
    x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor, *, before_down: bool
) -> Tensor:
    """Mixture of experts by sorted rows, of which backward keeps neither tokens' copies nor SwiGLU's output."""
    order, inverse, ends = sort_by_expert(experts, len(gate_up))
    fused = recompute_input(lambda x: permute(x, order, inverse), x, lambda rows: grouped_linear(rows, gate_up, ends))
    factors = permute_weights(weights, order, inverse)
    if before_down:
        rows = weighted_swiglu_linear(fused, down, factors, ends, 4)
    else:
        rows = recompute_input(lambda fused: swiglu(fused, 4), fused, lambda hidden: grouped_linear(hidden, down, ends))
    return combine(rows, order, inverse, None if before_down else weights)


@pytest.mark.parametrize("before_down", [False, True])
@pytest.mark.parametrize("name", [name for name in CHOICES if not name.startswith("more experts")])
def test_experts_and_all_their_gradients_are_those_of_the_definition(name: str, before_down: bool):
    experts, count = CHOICES[name]
    tokens, k = experts.shape
    _, weights, x = operands(tokens, k, 6)
    random = torch.Generator().manual_seed(0)
    matrices = [torch.randn(count, *size, generator=random, dtype=torch.float64) for size in ((16, 6), (6, 8))]
    found, expected = [], []
    by_rows = partial(experts_by_rows, before_down=before_down)
    for results, call in ((found, by_rows), (expected, experts_loop)):
        x, gate_up, down, weights = (tensor.detach().clone().requires_grad_() for tensor in (x, *matrices, weights))
        out = call(x, gate_up, down, experts, weights)
        results += [out.detach(), *torch.autograd.grad(out, (x, gate_up, down, weights), x.detach().cos())]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_rows_are_not_kept_for_backward():
    experts = drawn(7, 2, 4)
    order, inverse, ends = sort_by_expert(experts, 4)
    _, _, x = operands(7, 2, 6)
    weight = torch.randn(4, 6, 6, dtype=torch.float64, requires_grad=True)
    seen = []

    def multiply(rows: Tensor) -> Tensor:
        seen.append(StorageWeakRef(rows.untyped_storage()))
        return grouped_linear(rows, weight, ends)

    out = recompute_input(lambda x: permute(x, order, inverse), x.requires_grad_(), multiply)
    assert seen[0].expired()
    seen.append(StorageWeakRef(out.untyped_storage()))
    total = combine(out, order, inverse, None)
    del out
    assert seen[1].expired()
    found = torch.autograd.grad(total.sum(), [x, weight])
    plain = combine(grouped_linear(permute(x, order, inverse), weight, ends), order, inverse, None)
    for mine, theirs in zip(found, torch.autograd.grad(plain.sum(), [x, weight]), strict=True):
        assert torch.equal(mine, theirs)


def compiled() -> list[tuple[list[Tensor], list[Tensor]]]:
    """Layers with weights on either side, compiled and not, for two numbers of tokens."""
    found = []
    for before_down in (False, True):
        layer = partial(experts_by_rows, before_down=before_down)
        fast = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for tokens in (9, 14):
            experts = drawn(tokens, 2, 4)
            _, weights, x = operands(tokens, 2, 6, torch.float32)
            gate_up, down = torch.randn(4, 16, 6).requires_grad_(), torch.randn(4, 6, 8).requires_grad_()
            x, weights = x.requires_grad_(), weights.requires_grad_()
            results = []
            for call in (fast, layer):
                out = call(x, gate_up, down, experts, weights)
                grads = torch.autograd.grad(out, (x, gate_up, down, weights), x.cos().detach())
                results.append([out.detach(), *grads])
            found.append(tuple(results))
    return found


def test_experts_are_compiled_as_one_graph():
    # In a process where shapes are not checked: the compiler cannot look through what does.
    [found] = run_ranks(1, compiled)
    assert len(found) == 4
    for mine, expected in found:
        for tensor, other in zip(mine, expected, strict=True):
            torch.testing.assert_close(tensor, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_keep_what_they_promise_the_compiler(dtype: torch.dtype):
    _, inverse, ends = sort_by_expert(drawn(9, 3, 4), 4)
    padded = PaddedOrder.sort(drawn(9, 3, 4), 4, 4)
    rows, weights, x = operands(9, 3, 6, dtype)
    checks, operators = ("test_schema", "test_faketensor"), torch.ops.titan_exp
    for operator, args in (
        (operators.copy_tokens, (x, inverse, None)),
        (operators.copy_tokens, (x, padded.inverse, padded.padding)),
        (operators.cast_tokens, (x, padded.inverse, padded.padding)),
        (operators.add_expert_bias, (rows, x[:4], ends, weights.flatten())),
        (operators.expert_bias_backward, (rows, x[:4], ends, weights.flatten())),
        (operators.expert_bias_backward, (rows, None, ends, None)),
        (operators.sum_rows, (rows, inverse, weights)),
        (operators.sum_rows, (rows, inverse, None)),
        (operators.combine_backward, (rows, x, inverse, weights, None)),
    ):
        torch.library.opcheck(operator.default, args, test_utils=checks)


def test_shapes_are_known_without_numbers():
    """Also that no number comes to the host, which would wait for a GPU."""
    with FakeTensorMode():
        experts = torch.empty(9, 3, dtype=torch.int64)
        rows, weights, x = (torch.empty(size, requires_grad=True) for size in ((27, 6), (9, 3), (9, 6)))
        order, inverse, ends = sort_by_expert(experts, 4)
        out = combine(rows, order, inverse, weights)
        copies = permute(x, order, inverse)
        grads = torch.autograd.grad([out.sum(), copies.sum()], [rows, weights, x])
    assert [tuple(tensor.shape) for tensor in (order, inverse, ends, out, copies)] == [
        (27,),
        (9, 3),
        (4,),
        (9, 6),
        (27, 6),
    ]
    assert [tuple(tensor.shape) for tensor in grads] == [(27, 6), (9, 3), (9, 6)]
