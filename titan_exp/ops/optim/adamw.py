"""AdamW's update of one parameter in one pass over memory: gradient, weight and moments are read once and written once.

Clipping is a factor on the device, multiplied in where the gradient is read: no pass of its own, and no number that the
host waits for.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

BLOCK = 1024
"""Numbers that a program of the kernel updates."""


def bias_rates(steps: Tensor, *, lr: float, betas: tuple[float, float]) -> Tensor:
    """Bias corrections by step, [parameters, 2] in fp32 from fp64: lr / (1 - beta1^step), and
    sqrt(1 - beta2^step).

    Args:
        steps: of each parameter the number of the step that is being made, from 1.
        lr: learning rate.
        betas: decay rates of the moments.
    """
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
    """Update a weight and its moments in place, on CUDA (or anywhere in Triton's interpreter).

    Args:
        weight: fp32, of any shape, its memory without gaps.
        gradient: of the same shape, in any floating-point type; it is left as it is.
        first: first moment, laid out like the weight; computed in fp32, rounded to its type.
        second: second moment, the same.
        rates: its row of `bias_rates`.
        decay: learning rate times weight decay.
        betas: decay rates of the moments.
        eps: added to the denominator.
        factor: an fp32 scalar that the gradient is multiplied by; None is 1.
        copy: laid out like the weight, and takes the new weight rounded to its own type.
    """
    if weight.numel() == 0:  # of a parameter that is divided unevenly a rank may hold nothing
        return
    if isinstance(weight, FakeTensor):
        # Fake tensors have no values; the planner sees the memory that the kernel reads and writes.
        torch._foreach_add_([weight, first, second], [gradient] * 3)
        return
    from titan_exp.ops.optim.adamw_kernel import adamw_kernel

    if gradient.stride() != weight.stride():
        gradient = torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)
    laid_out = [it for it in (first, second, copy) if it is not None]
    assert weight.dtype == torch.float32, "master weights are in fp32"
    assert all(it.stride() == weight.stride() for it in laid_out), "moments and copy are laid out like the weight"
    launch: Any = adamw_kernel[(-(-weight.numel() // BLOCK),)]
    launch(
        weight,
        gradient,
        first,
        second,
        weight if copy is None else copy,
        rates if factor is None else factor,
        rates,
        1 - decay,
        betas[0],
        1 - betas[0],
        betas[1],
        1 - betas[1],
        eps,
        weight.numel(),
        has_factor=factor is not None,
        has_copy=copy is not None,
        block=BLOCK,
    )
