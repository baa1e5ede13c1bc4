"""Fused AdamW update: gradient, weight and moments are each read and written once.

Clipping is a factor on the device, applied when the gradient is read, without a separate pass or synchronization. The
kernel is memory-bound, so square roots and quotients are correctly rounded.
"""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from titan_exp.ops.triton_kernels import jit, rounded, tl

BLOCK = 1024  # elements per kernel program


def bias_rates(steps: Tensor, *, lr: float, betas: tuple[float, float]) -> Tensor:
    """Bias corrections, fp32 [parameters, 2]: lr / (1 - beta1^step) and sqrt(1 - beta2^step), for steps from 1."""
    steps = steps.double()
    rates = lr / (1 - betas[0] ** steps), (1 - betas[1] ** steps).sqrt()
    return torch.stack(rates, dim=1).float()


def adamw_update(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    rates: Tensor,
    decay: float,
    betas: tuple[float, float],
    eps: float,
    factor: Tensor | None = None,
    copy: Tensor | None = None,
) -> None:
    """Update a weight and its moments in place, on CUDA. The weight is dense in memory; the moments and `copy` have its
    strides, and each has its own float dtype. `rates` is a row of `bias_rates`, `decay` is learning rate times weight
    decay, and `factor` is an fp32 scalar that scales the gradient. `copy` receives the new weight in its own dtype."""
    if weight.numel() == 0:  # an empty shard of an unevenly sharded parameter
        return
    if isinstance(weight, FakeTensor):
        # Fake tensors have no values; the planner sees one call, and the bytes that the kernel reads and writes.
        torch._foreach_add_([weight, first, second], [gradient, rates[0] if copy is None else copy, rates[0]])
        return
    if gradient.stride() != weight.stride():
        gradient = torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)
    buffers = [tensor for tensor in (first, second, copy) if tensor is not None]
    assert all(tensor.stride() == weight.stride() for tensor in buffers), "moments and copy have the weight's strides"
    pointers = (
        weight,
        gradient,
        first,
        second,
        weight if copy is None else copy,
        rates if factor is None else factor,
        rates,
    )
    numbers = 1 - decay, betas[0], 1 - betas[0], betas[1], 1 - betas[1], eps, weight.numel()
    options = {"has_factor": factor is not None, "has_copy": copy is not None, "block": BLOCK}
    adamw_kernel[(-(-weight.numel() // BLOCK),)](*pointers, *numbers, **options)


@jit
def adamw_kernel(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    weight: tl.tensor,
    gradient: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    copy: tl.tensor,
    factor: tl.tensor,
    rates: tl.tensor,
    keep: tl.tensor,
    beta1: tl.tensor,
    rest1: tl.tensor,
    beta2: tl.tensor,
    rest2: tl.tensor,
    eps: tl.tensor,
    size: tl.tensor,
    has_factor: tl.constexpr,
    has_copy: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Update `block` elements of a parameter; arguments are as in `adamw_update`."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < size
    change = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    if has_factor:
        change *= tl.load(factor)
    mean = tl.load(first + at, mask=inside, other=0.0).to(tl.float32) * beta1 + change * rest1
    square = tl.load(second + at, mask=inside, other=0.0).to(tl.float32) * beta2 + change * change * rest2
    # The update uses the moments before they are rounded for storage.
    root = tl.div_rn(tl.sqrt_rn(square), tl.load(rates + 1)) + eps
    old = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    new = old * keep - tl.div_rn(tl.load(rates) * mean, root)
    tl.store(first + at, rounded(mean, first.dtype.element_ty), mask=inside)  # type: ignore[attr-defined]  # pointers have it
    tl.store(second + at, rounded(square, second.dtype.element_ty), mask=inside)  # type: ignore[attr-defined]  # pointers have it
    tl.store(weight + at, rounded(new, weight.dtype.element_ty), mask=inside)  # type: ignore[attr-defined]  # pointers have it
    if has_copy:
        tl.store(copy + at, rounded(new, copy.dtype.element_ty), mask=inside)  # type: ignore[attr-defined]  # pointers have it
