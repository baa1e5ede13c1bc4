"""Fused backward passes against autograd of the definition, and what they keep."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from titan_exp.ops import autograd
from titan_exp.ops.attention.rope import Frequencies, RotaryEmbedding, rotate, split_rotated
from titan_exp.ops.autograd import recompute_input
from titan_exp.ops.swiglu import swiglu

GROUPS = (2, 5, 3, 4, 8)
"""[batch, seq, key-value heads, two query heads with a key and a value, head_dim]."""


def rope() -> tuple[Tensor, Tensor]:
    table = RotaryEmbedding(8, 5, Frequencies(100.0))
    table.reset()
    return table(5, None)


def qkv() -> Tensor:
    return torch.randn(GROUPS, generator=torch.Generator().manual_seed(0)).requires_grad_()


def plain_heads(groups: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split and rotated by pairs, as published."""
    minus, plus = sin.unbind(-2)

    def turned(heads: Tensor) -> Tensor:
        first, second = heads.flatten(2, 3).chunk(2, dim=-1)
        return torch.cat((first * cos + second * minus, second * cos + first * plus), dim=-1)

    query, key, value = groups.split((2, 1, 1), dim=3)
    return turned(query), turned(key), value.flatten(2, 3)


def test_swiglu_has_the_gradient_of_its_definition():
    x = torch.randn(2, 3, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda fused: swiglu(fused, 4), (x,))
    weights = torch.randn(2, 3, 8, dtype=torch.float64)
    gate, up = x.unflatten(-1, (-1, 2, 4)).unbind(-2)
    (expected,) = torch.autograd.grad((F.silu(gate) * up).flatten(-2), x, weights)
    torch.testing.assert_close(torch.autograd.grad(swiglu(x, 4), x, weights)[0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_small_swiglu_and_its_gradient_are_bitwise_those_of_a_large_one(monkeypatch, dtype):
    x, weights = torch.randn(2, 3, 16).to(dtype), torch.randn(2, 3, 8).to(dtype)
    found = []
    for recomputed in (0, 2 * x.nbytes):
        monkeypatch.setattr(autograd, "RECOMPUTED_BYTES", recomputed)
        leaf = x.clone().requires_grad_()
        out = swiglu(leaf, 4)
        found.append((out, *torch.autograd.grad(out, leaf, weights), type(out.grad_fn).__name__))
    (large, small) = found
    assert torch.equal(large[0], small[0])
    assert torch.equal(large[1], small[1])
    assert large[2] != small[2]


def test_heads_and_their_gradient_are_bitwise_those_of_plain_rotation():
    weights = [torch.randn(2, 5, heads, 8) for heads in (6, 3, 3)]
    found, expected = qkv(), qkv()
    for x, split in ((found, split_rotated), (expected, plain_heads)):
        heads = split(x, *rope())
        torch.autograd.backward(heads, weights)
    for part, plain in zip(split_rotated(found, *rope()), plain_heads(expected, *rope()), strict=True):
        assert torch.equal(part, plain)
    assert found.grad is not None
    assert expected.grad is not None
    assert torch.equal(found.grad, expected.grad)


def test_a_projection_split_into_heads_is_not_kept():
    x = qkv()
    fused = x * 2
    storage = StorageWeakRef(fused.untyped_storage())
    heads = split_rotated(fused, *rope())
    del fused
    assert storage.expired()
    assert heads[2].is_contiguous()


def test_rotation_backward_is_rotation_by_the_opposite_angle():
    cos, sin = rope()
    heads = torch.randn(2, 5, 3, 8)
    torch.testing.assert_close(rotate(rotate(heads, cos, sin), cos, -sin), heads)


def layer() -> tuple[nn.Linear, Tensor, list[weakref.ref[Tensor]]]:
    """A linear layer after a SwiGLU, its input, and references to all outputs of the SwiGLU."""
    torch.manual_seed(0)
    return nn.Linear(8, 4, bias=False), torch.randn(2, 3, 16, requires_grad=True), []


def run(linear: nn.Linear, x: Tensor, seen: list[weakref.ref[Tensor]]) -> Tensor:
    def cheap(tensor: Tensor) -> Tensor:
        out = swiglu(tensor, 4)
        seen.append(weakref.ref(out))
        return out

    return recompute_input(cheap, x, linear)


def test_an_output_is_recomputed_instead_of_kept():
    linear, x, seen = layer()
    out = run(linear, x, seen)
    assert [ref() for ref in seen] == [None]
    out.square().sum().backward()
    assert len(seen) == 2
    found = (x.grad, linear.weight.grad)
    other, y, _ = layer()
    other(swiglu(y, 4)).square().sum().backward()
    for gradient, expected in zip(found, (y.grad, other.weight.grad), strict=True):
        assert gradient is not None
        assert expected is not None
        assert torch.equal(gradient, expected)


def test_a_small_output_is_kept(monkeypatch: pytest.MonkeyPatch):
    linear, x, seen = layer()
    monkeypatch.setattr(autograd, "RECOMPUTED_BYTES", 2 * 3 * 8 * 4 + 1)
    run(linear, x, seen).square().sum().backward()
    assert len(seen) == 1


@pytest.mark.parametrize("grad", [True, False])
def test_checkpointed_or_without_gradients_nothing_is_hooked(grad: bool):
    linear, x, seen = layer()
    with torch.set_grad_enabled(grad):
        out = checkpoint(run, linear, x, seen, use_reentrant=False) if grad else run(linear, x, seen)
    assert isinstance(out, Tensor)
    if grad:
        out.sum().backward()
    # Once in forward, and once by the checkpoint's recomputation alone.
    assert len(seen) == (2 if grad else 1)


def test_checkpointing_frees_the_input_too():
    linear, x, seen = layer()
    inputs: list[StorageWeakRef] = []

    def block(x: Tensor) -> Tensor:
        gate_up = x * 2
        inputs.append(StorageWeakRef(gate_up.untyped_storage()))
        return run(linear, gate_up, seen)

    out = checkpoint(block, x, use_reentrant=False)
    assert isinstance(out, Tensor)
    assert inputs[0].expired()


def test_tensors_saved_by_others_stay():
    """Another tensor of the same size is not taken for the output."""
    linear, x, _ = layer()
    like = torch.randn(2, 3, 8, requires_grad=True)
    recompute_input(
        lambda t: swiglu(t, 4), x, lambda y: linear(y) * (like * like).sum(-1, keepdim=True)
    ).sum().backward()
    assert like.grad is not None
    expected = 2 * like * linear(swiglu(x, 4)).sum(-1, keepdim=True)
    torch.testing.assert_close(like.grad, expected.detach())


def test_nested_outputs_are_recomputed_from_each_other():
    linear, x, seen = layer()
    norm, up = nn.RMSNorm(16), nn.Linear(16, 16, bias=False)
    normed: list[StorageWeakRef] = []

    def cheap(x: Tensor) -> Tensor:
        y = norm(x)
        normed.append(StorageWeakRef(y.untyped_storage()))
        return y

    def doubled(y: Tensor) -> Tensor:
        # Its input is the norm's output itself, which nobody else may keep, and it keeps one more use of it.
        return recompute_input(lambda y: y * 2, y, up) + up(y)

    out = recompute_input(cheap, x, lambda y: run(linear, doubled(y), seen))
    assert normed[0].expired(), "neither the outer output, which is the source of an inner one,"
    assert seen[0]() is None, "nor that of the innermost"
    out.square().sum().backward()
    found = [x.grad, norm.weight.grad, up.weight.grad, linear.weight.grad]
    x.grad = None
    for module in (norm, up, linear):
        module.zero_grad()
    y = norm(x)
    linear(swiglu(up(y * 2) + up(y), 4)).square().sum().backward()
    for gradient, expected in zip(found, (x.grad, norm.weight.grad, up.weight.grad, linear.weight.grad), strict=True):
        assert gradient is not None
        assert expected is not None
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-6)


def test_outputs_that_operators_save_do_not_keep_the_graph_alive():
    x, weight = torch.randn(3, 4, requires_grad=True), nn.Parameter(torch.randn(4, 4))

    def consumer(y: Tensor) -> Tensor:
        return (y @ weight).exp()  # saves its output

    out = recompute_input(torch.sin, x * 2, consumer)
    saved = StorageWeakRef(out.untyped_storage())
    # The first part of a split backward pass releases no saved tensors.
    torch.autograd.backward(out, torch.ones_like(out), retain_graph=True)
    del out
    assert saved.expired()
