"""Bias of experts: to each row that of its expert, rows sorted by expert, times the weight of the row if given.

The gradient of a bias sums the rows of an expert in fp32, in their order: no atomics. Uncompiled on CUDA, each
direction is one Triton kernel, which reads the rows or their gradient once.
"""

from typing import Any

import torch
from jaxtyping import Float, Int32
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from titan_exp.ops.moe.grouped_mm import runs_of_experts
from titan_exp.ops.needs_input_grad import needs_input_grad
from titan_exp.ops.runs_kernel import runs_kernel

BLOCK = 1024
"""Columns that a program of the forward kernel has at a time."""
ROWS, COLUMNS = 32, 128
"""Rows that a program of the backward kernel has at a time, and its columns."""


def add_expert_bias(
    rows: Float[Tensor, "rows width"],
    bias: Float[Tensor, "experts width"],
    ends: Int32[Tensor, " experts"],
    weights: Float[Tensor, " rows"] | None = None,
) -> Float[Tensor, "rows width"]:
    """rows + weight · bias[expert], in the dtype of `rows`.

    `ends` are the ends of the experts' rows. Rows after the last end stay as they are.
    """
    return _AddExpertBias.apply(rows, bias, ends, weights)  # type: ignore[return-value]  # a Tensor


class _AddExpertBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, ends: Tensor, weights: Tensor | None) -> Tensor:
        # The bias is read for the gradient of weights only.
        ctx.save_for_backward(None if weights is None else bias, ends, weights)
        ctx.dtype = bias.dtype
        if torch.compiler.is_compiling():
            # The compiler fuses it with what follows.
            added = _bias_of_rows(bias, ends, rows.shape[0])
            return rows + (added if weights is None else added * weights[:, None]).to(rows.dtype)
        return _add_bias(rows.contiguous(), bias, ends, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        bias, ends, weights = ctx.saved_tensors
        needs_bias_grad, bias_grad, weights_grad = needs_input_grad(ctx)[1], None, None
        if needs_bias_grad or weights is not None:
            bias_grad, weights_grad = _bias_backward(gradients[0].contiguous(), bias, ends, weights)
        return (
            gradients[0],
            bias_grad.to(ctx.dtype) if bias_grad is not None and needs_bias_grad else None,
            None,
            None if weights is None else weights_grad,
        )


def _bias_of_rows(bias: Tensor, ends: Tensor, rows: int) -> Tensor:
    row = torch.arange(rows, device=ends.device, dtype=ends.dtype)
    expert = torch.searchsorted(ends, row, right=True)
    # One more expert, of the rows after the last end.
    return torch.cat((bias, bias.new_zeros(1, bias.shape[1])))[expert]


@torch.library.custom_op("titan_exp::add_expert_bias", mutates_args=())
def _add_bias(rows: Tensor, bias: Tensor, ends: Tensor, weights: Tensor | None) -> Tensor:
    if not runs_kernel(rows):
        out = rows.clone()
        for expert, part in runs_of_experts(ends, rows.shape[0]):
            added = bias[expert] if weights is None else bias[expert] * weights[part, None]
            out[part].add_(added.to(rows.dtype))
        return out
    out, experts = _empty_rows(rows, bias, ends, weights), ends.shape[0]
    sizes = {"experts": experts, "padded": 1 << (experts - 1).bit_length(), "block": BLOCK}
    factors = rows if weights is None else weights
    # The weighted bias is rounded before the sum, as torch's operators round it.
    options = {"weighted": weights is not None, "enable_fp_fusion": False}
    _launch("add_expert_bias_kernel", rows.shape[:1], out, rows, bias, ends, factors, **sizes, **options)
    return out


@torch.library.custom_op("titan_exp::expert_bias_backward", mutates_args=())
def _bias_backward(
    gradient: Tensor, bias: Tensor | None, ends: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of the bias, in fp32 at least, and of weights; `bias` and `weights` are given together."""
    bias_grad, weights_grad = _empty_gradients(gradient, bias, ends, weights)
    if not runs_kernel(gradient):
        bias_grad.zero_()
        weights_grad.zero_()
        for expert, part in runs_of_experts(ends, gradient.shape[0]):
            upstream = gradient[part].to(bias_grad.dtype)
            factors = upstream.new_ones(upstream.shape[0]) if weights is None else weights[part].to(upstream.dtype)
            torch.mv(upstream.t(), factors, out=bias_grad[expert])
            if bias is not None:
                weights_grad[part] = (upstream @ bias[expert].to(upstream.dtype)).to(weights_grad.dtype)
        return bias_grad, weights_grad
    # Programs have columns of an expert. Their parts of the weights' gradients are summed afterwards, in one order.
    blocks = -(-gradient.shape[1] // COLUMNS)
    parts = bias_grad.new_zeros(blocks, weights_grad.numel())
    tensors = gradient, gradient if bias is None else bias, ends, gradient if weights is None else weights, parts
    sizes = {"height": weights_grad.numel(), "side": ROWS, "block": COLUMNS}
    grid = ends.shape[0], blocks
    _launch("expert_bias_backward_kernel", grid, bias_grad, *tensors, **sizes, weighted=weights is not None)
    return bias_grad, torch.sum(parts, 0, out=weights_grad)


@_add_bias.register_fake
def _empty_rows(rows: Tensor, bias: Tensor, ends: Tensor, weights: Tensor | None) -> Tensor:
    return torch.empty_like(rows)


@_bias_backward.register_fake
def _empty_gradients(
    gradient: Tensor, bias: Tensor | None, ends: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(gradient.dtype, torch.float32)
    bias_grad = gradient.new_empty(ends.shape[0], gradient.shape[1], dtype=wide)
    return bias_grad, bias_grad.new_empty(0) if weights is None else torch.empty_like(weights)


def _launch(name: str, grid: tuple[int, ...], output: Tensor, *tensors: Tensor, **constants: int | bool) -> None:
    if isinstance(output, FakeTensor) or output.numel() == 0:  # experts may get no token
        return
    from titan_exp.ops.moe import expert_bias_kernels

    launch: Any = getattr(expert_bias_kernels, name)[grid]
    launch(output, *(tensor.contiguous() for tensor in tensors), output.shape[1], **constants)
