"""Biases of experts and variants of SwiGLU against plain math in fp64: values and gradients."""

import pytest
import torch
from torch import Tensor

from titan_exp.ops.moe.grouped_mm import add_expert_bias, bias_backward_without_ends
from titan_exp.ops.swiglu import swiglu, weighted_swiglu
from titan_exp.ops.swiglu_variant import SwiGLUVariant

ENDS = torch.tensor([3, 3, 7], dtype=torch.int32)
"""One expert without rows, and two rows of no expert."""


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("weighted", [False, True])
def test_each_row_gets_the_bias_of_its_expert(weighted: bool):
    rows, bias = drawn(9, 5), drawn(3, 5)
    weights = drawn(9) if weighted else None
    expert = torch.tensor([0, 0, 0, 2, 2, 2, 2])
    added = bias[expert] if weights is None else bias[expert] * weights[:7, None]
    expected = rows + torch.cat((added, torch.zeros(2, 5)))
    found = add_expert_bias(rows, bias, ENDS, weights)
    assert torch.equal(found, expected)
    leaves = [leaf for leaf in (rows, bias, weights) if leaf is not None]
    gradient = torch.randn(9, 5, dtype=torch.float64)
    wanted = torch.autograd.grad(expected, leaves, gradient)
    for mine, other in zip(torch.autograd.grad(found, leaves, gradient), wanted, strict=True):
        torch.testing.assert_close(mine, other)
    # On a GPU no end is read on the host.
    with torch.no_grad():
        of_bias, of_weights = bias_backward_without_ends(gradient, bias if weighted else None, ENDS, weights)
    torch.testing.assert_close(of_bias, wanted[1])
    assert (of_weights is None) == (weights is None)
    torch.testing.assert_close(of_weights, wanted[2] if weighted else None)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("variant", [SwiGLUVariant(1.702, 0.7, 1.0), SwiGLUVariant(0.5), SwiGLUVariant(1.0, 0.1)])
def test_variants_of_swiglu_and_their_gradients(variant: SwiGLUVariant, weighted: bool):
    fused, weights = drawn(6, 128), drawn(6)
    gate, up = fused.unflatten(-1, (2, 2, 32)).unbind(-2)
    if variant.limit is not None:
        gate, up = gate.clamp(max=variant.limit), up.clamp(-variant.limit, variant.limit)
    expected = ((up + variant.offset) * gate * (variant.alpha * gate).sigmoid()).flatten(-2)
    expected = expected * weights[:, None] if weighted else expected
    found = weighted_swiglu(fused, weights, variant=variant) if weighted else swiglu(fused, variant=variant)
    torch.testing.assert_close(found, expected)
    leaves, gradient = [fused, weights] if weighted else [fused], torch.randn(6, 64, dtype=torch.float64)
    wanted = torch.autograd.grad(expected, leaves, gradient)
    for mine, other in zip(torch.autograd.grad(found, leaves, gradient), wanted, strict=True):
        torch.testing.assert_close(mine, other)
