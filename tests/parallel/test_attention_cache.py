"""FlexAttention's results are kept by selective activation checkpointing without a compiler, and its arguments are not.

Compiled code is called as torch's compiler calls it, which has no FlexAttention with gradients on a CPU.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops import inductor_compiled_code, wrap
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from titan_exp.parallel.activation_checkpoint import _automatic_contexts
from titan_exp.parallel.saved_calls import FLEX_ATTENTION, call_name

ARGUMENTS: list[StorageWeakRef] = []


def code(inputs: list[Any]) -> list[Any]:
    """The result, then what backward reads: an argument, and the size of another."""
    size, x = inputs
    inputs.clear()
    ARGUMENTS.append(StorageWeakRef(x.untyped_storage()))
    return [x.sin(), x, size]


# Torch 2.11 calls the compiled function itself.
CODE: Any = getattr(wrap, "InductorCompiledCallable", lambda function: function)(code)


class Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out, saved, ctx.size = inductor_compiled_code(CODE, [7, x])
        ctx.save_for_backward(saved)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        assert ctx.size == 7
        return gradients[0] * x.cos()


def block(x: Tensor) -> Tensor:
    return Compiled.apply(Compiled.apply(x * 2) * 3).cos()  # type: ignore[union-attr]  # a Tensor


@pytest.mark.parametrize("kept", [True, False])
def test_results_are_kept_and_arguments_are_not(kept: bool):
    x = torch.linspace(0, 1, 5, requires_grad=True)
    saved = (call_name(FLEX_ATTENTION, 0),) if kept else ()
    out = checkpoint(block, x, use_reentrant=False, context_fn=partial(_automatic_contexts, saved, compiled=False))
    assert len(ARGUMENTS) == 2
    assert all(argument.expired() for argument in ARGUMENTS)
    out.sum().backward()
    assert len(ARGUMENTS) == (2 if kept else 4)
    again = x.detach().requires_grad_()
    block(again).sum().backward()
    assert x.grad is not None
    assert again.grad is not None
    assert torch.equal(x.grad, again.grad)
    ARGUMENTS.clear()
