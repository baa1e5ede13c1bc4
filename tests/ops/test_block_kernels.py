"""Triton kernels of a block's elementwise operators against torch's operators: results and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.interpreted import DEVICES, needs_triton, run_kernels
from titan_exp.ops.swiglu_variant import SWIGLU, SwiGLUVariant

pytestmark = needs_triton

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
        return {name: (found, ours[name]) for name, found in call().items()}
    finally:
        module.runs_kernel = chosen


def swiglus(device: str) -> Results:
    """Groups that do and do not divide a program's numbers; the last program's are not all there."""
    from titan_exp.ops import swiglu

    swiglu.BLOCK = 256 if device == "cpu" else swiglu.BLOCK

    def call() -> dict[str, Tensor]:
        found = {}
        limited = SwiGLUVariant(1.702, 7.0, 1.0)
        for group, dtype, variant in (
            (5, torch.bfloat16, SWIGLU),
            (16, torch.bfloat16, SWIGLU),
            (80, torch.float32, SWIGLU),
            (10, torch.bfloat16, limited),
            (8, torch.float32, limited),
        ):
            random = torch.Generator().manual_seed(group)
            # Gates of up to some 30, where sigmoid saturates.
            x = torch.randn(3, 2, 160, generator=random).mul(8).to(device, dtype)
            gradient = torch.randn(2, 3, 80, generator=random).to(device, dtype).transpose(0, 1)
            leaf = (x if group == 5 else x.transpose(0, 1).contiguous().transpose(0, 1)).requires_grad_()
            out = swiglu.swiglu(leaf, group, variant)
            (found[f"{group}, gradient"],) = torch.autograd.grad(out, leaf, gradient)
            found[f"{group}"] = out.detach()
        assert swiglu.swiglu(x[:0], 5, limited).shape == (0, 2, 80)
        return {name: tensor.cpu() for name, tensor in found.items()}

    return both_ways(swiglu, device, call)


@pytest.mark.parametrize("device", DEVICES)
def test_swiglu_and_its_gradient_are_those_of_torch(device: str):
    [found] = run_kernels(1, device, swiglus)
    assert len(found) == 10
    for name, (theirs, ours) in found.items():
        assert ours.shape == theirs.shape, name
        # Intermediate results are rounded alike; their exponentials differ in the last bit of fp32.
        if ours.dtype == torch.bfloat16:
            assert (ours != theirs).float().mean() < 0.02, name
        tolerance = 2**-7 if ours.dtype == torch.bfloat16 else 2e-6
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=1e-6, msg=name)


def splits(device: str) -> Results:
    """Heads and widths that fill no program; positions of one sequence, and of each; gradients in other layouts."""
    from titan_exp.ops.attention import rope

    def call() -> dict[str, Tensor]:
        found = {}
        for dtype, kv_heads, group, head_dim, each in (
            (torch.bfloat16, 3, 4, 12, False),
            (torch.float32, 2, 1, 16, True),
        ):
            random = torch.Generator().manual_seed(head_dim)
            table = rope.RotaryEmbedding(head_dim, 9, rope.Frequencies(100.0))
            table.reset()
            angles = table.to(device)(
                5, torch.tensor([[0, 1, 2, 3, 4], [8, 7, 2, 1, 3]], device=device) if each else None
            )
            x = torch.randn(2, 5, kv_heads, group + 2, head_dim, generator=random).to(device, dtype).requires_grad_()
            parts = rope.split_rotated(x, *angles)
            gradients = [torch.randn(part.shape, generator=random).to(device, dtype) for part in parts]
            gradients[1] = gradients[1].transpose(1, 2).contiguous().transpose(1, 2)
            (found[f"gradient {each=}"],) = torch.autograd.grad(parts, x, gradients)
            assert all(part.is_contiguous() for part in parts)
            found |= {f"{name} {each=}": part.detach() for name, part in zip("qkv", parts, strict=True)}
        return {name: tensor.cpu() for name, tensor in found.items()}

    return both_ways(rope, device, call)


@pytest.mark.parametrize("device", DEVICES)
def test_split_and_rotated_heads_and_their_gradient_are_bitwise_those_of_torch(device: str):
    [found] = run_kernels(1, device, splits)
    assert len(found) == 8
    for name, (theirs, ours) in found.items():
        assert torch.equal(theirs, ours), name
