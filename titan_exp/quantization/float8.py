"""Float8: casts, scales and matmuls, and the linear layer of three recipes, in forward and backward.

The arithmetic is torchao's, on plain tensors: a tensor is multiplied by its scale before the cast. torchao's tensor
subclasses do not support our tensor parallelism, and its modules compute scales from one rank's shard.

If ranks hold parts of the dim that shares a scale, amax is reduced over them, so scales do not depend on the layout.
With sequence parallelism, each rank casts its own tokens and float8 is gathered. The numbers are the same; the bytes
are half where one cast serves forward and backward (tensorwise), and as many where each has its own (rowwise).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_exp.config.groups.parallelism import QuantizationConfig
from titan_exp.config.torch_features import import_torchao
from titan_exp.models.blocks.linear import TensorParallelCollectives
from titan_exp.ops.autograd import in_type, needs_input_grad
from titan_exp.ops.float8 import dual_amax, dual_cast

with import_torchao():
    from torchao.float8.float8_training_tensor import Float8TrainingTensor
    from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated

AmaxReduce = Callable[[Tensor], Tensor]  # takes the elementwise maximum over ranks
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Float8Matrix(NamedTuple):
    """A matrix in float8 with its scales. `t()` transposes it without a copy."""

    data: Tensor
    scale: Tensor  # factors applied before the cast: a scalar, one per row [rows, 1], or one per column [1, columns]
    inverse: Tensor  # 1 / scale, which float8 instructions read

    @staticmethod
    def of(data: Tensor, scale: Tensor) -> "Float8Matrix":
        """Wrap a matrix that was cast with these scales."""
        return Float8Matrix(data, scale, scale.reciprocal())

    def t(self) -> "Float8Matrix":
        """The transposed matrix."""
        return Float8Matrix(self.data.t(), self.scale.t(), self.inverse.t())


def amax_of(tensor: Tensor, over: int | None) -> Tensor:
    """Largest magnitude of a matrix, or of each row or column; `over` is the reduced dim, kept with size 1. A norm
    reads the matrix only once even in eager mode. Inductor fuses reductions of rows into the kernel that computes the
    matrix, but not a reduction of the whole matrix."""
    if over is not None:
        return torch.linalg.vector_norm(tensor, torch.inf, dim=over, keepdim=True)
    return torch.linalg.vector_norm(tensor, torch.inf, dim=-1).amax()


def scale_of(
    tensor: Tensor, dtype: torch.dtype, *, over: int | None, power_of_two: bool, amax_reduce: AmaxReduce | None = None
) -> Tensor:
    """fp32 scales that map the amax of a matrix [rows, columns] to the largest value of a float8 dtype. `over` is the
    dim whose numbers share a scale, kept with size 1; None gives one scalar scale. `power_of_two` rounds down.
    `amax_reduce` covers ranks whose numbers share these scales."""
    amax = amax_of(tensor, over)
    return scale_of_amax(amax if amax_reduce is None else amax_reduce(amax), dtype, power_of_two=power_of_two)


def scale_of_amax(amax: Tensor, dtype: torch.dtype, *, power_of_two: bool) -> Tensor:
    """Scales from amax values, as in `scale_of`."""
    return amax_to_scale(amax, dtype, round_scales_to_power_of_2=power_of_two)


def cast(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast tensor · scale to float8, saturating."""
    return to_fp8_saturated(tensor.float() * scale, dtype)


def multiply(
    left: Float8Matrix, right: Float8Matrix, dtype: torch.dtype, *, emulated: bool, fast: bool = False
) -> Tensor:
    """Multiply left [m, k] by right [k, n], in `dtype`; scales are scalars, or [m, 1] and [1, n]. `fast` accumulates in
    fewer bits, which is faster on Hopper. The matmul itself applies rowwise scales (cuBLAS 12.9 on Hopper), even
    without `fast`, in which case torchao multiplies the output by them in separate passes."""
    if emulated:
        return in_type(torch.mm(left.data.float() / left.scale, right.data.float() / right.scale), dtype)
    left_inverse, right_inverse = left.inverse, right.inverse
    if left_inverse.dim() == 0 and right_inverse.dim() > 0:
        left_inverse = left_inverse.expand(left.data.shape[0], 1).contiguous()
    if right_inverse.dim() == 0 and left_inverse.dim() > 0:
        right_inverse = right_inverse.expand(1, right.data.shape[1]).contiguous()
    if left_inverse.dim() > 0:
        # Transposed column scales have another stride in a dim of size 1, which torch refuses.
        left_inverse = left_inverse.flatten()[:, None]
    # Float8 instructions require row-major left and column-major right matrices; rowwise scales, a result in bf16.
    out = torch._scaled_mm(
        left.data.contiguous(),
        right.data.t().contiguous().t(),
        scale_a=left_inverse,
        scale_b=right_inverse,
        out_dtype=torch.bfloat16 if left_inverse.dim() > 0 else dtype,
        use_fast_accum=fast,
    )
    return in_type(out, dtype)


class Float8Weight(NamedTuple):
    """Weight in float8 in both layouts, cast once per optimizer step."""

    rows: Float8Matrix  # matrix [outputs, inputs] for the forward pass
    columns: Float8Matrix  # matrix [outputs, inputs] in transposed memory, for the gradient of the input


@dataclass(frozen=True)
class Float8:
    """Float8 recipe, with the sharding of a linear."""

    rowwise: bool
    """True for one scale per row of the left and per column of the right matrix; False for one scale per matrix."""
    high_precision_weight_gradient: bool
    power_of_two: bool
    emulated: bool  # multiply in fp32
    input_amax_reduce: AmaxReduce | None = None  # amax reduction if inputs are sharded by tensor parallelism
    output_amax_reduce: AmaxReduce | None = None  # amax reduction if outputs are sharded
    dual_cast: bool = False
    """Cast matrices that are needed in both layouts by our dual-cast kernel, with the same results."""
    gathers_input: TensorParallelCollectives | None = None
    """Ranks that hold parts of the input's tokens; each casts its tokens, then float8 is gathered."""
    scatters_output: TensorParallelCollectives | None = None
    """Ranks that each keep their tokens of the reduced output; in backward these tokens are cast, then gathered."""

    @staticmethod
    def of(config: QuantizationConfig, *, emulated: bool) -> "Float8":
        """Build the recipe that the configuration names, for one rank."""
        return Float8(
            rowwise=config.recipe != "float8_tensorwise",
            high_precision_weight_gradient=config.recipe == "float8_rowwise_gw_hp",
            power_of_two=config.power_of_two_scales,
            emulated=emulated,
            dual_cast=config.fused_casts is not False and config.has_dual_casts and not emulated,
        )

    def sharded(self, *, input_sharded: bool, amax_reduce: AmaxReduce) -> "Float8":
        """Recipe for ranks that share inputs or outputs; `amax_reduce` takes the maximum over them."""
        return replace(self, **{"input_amax_reduce" if input_sharded else "output_amax_reduce": amax_reduce})

    @property
    def gradient_type(self) -> torch.dtype:
        """Dtype of output gradients: e5m2 for its wide range if they share one scale."""
        return E4M3 if self.rowwise else E5M2

    @property
    def column_scales(self) -> bool:
        """True if the weight has one scale per column for the input's gradient; False if it has a single scale."""
        return self.rowwise and not self.high_precision_weight_gradient

    def scale_of_amax(self, amax: Tensor, dtype: torch.dtype, amax_reduce: AmaxReduce | None = None) -> Tensor:
        """Scales from amax values of this rank."""
        return scale_of_amax(amax if amax_reduce is None else amax_reduce(amax), dtype, power_of_two=self.power_of_two)

    def quantize(
        self, tensor: Tensor, dtype: torch.dtype, over: int | None, amax_reduce: AmaxReduce | None
    ) -> Float8Matrix:
        """Cast a matrix to float8; returns it with its scales (see `scale_of`)."""
        scale = scale_of(tensor, dtype, over=over, power_of_two=self.power_of_two, amax_reduce=amax_reduce)
        return Float8Matrix.of(cast(tensor, scale, dtype), scale)

    def quantize_tokens(
        self,
        tensor: Tensor,
        dtype: torch.dtype,
        over: int | None,
        amax_reduce: AmaxReduce | None,
        ranks: TensorParallelCollectives | None,
    ) -> Float8Matrix:
        """Cast all tokens [..., channels] to a float8 matrix. `ranks` hold parts of them, and each casts its own."""
        own = tensor.reshape(-1, tensor.shape[-1])
        if ranks is not None and over != -1:
            amax_reduce = self.input_amax_reduce or self.output_amax_reduce
        scale = scale_of(own, dtype, over=over, power_of_two=self.power_of_two, amax_reduce=amax_reduce)
        # We cast in the shape of the tokens, since async tensor parallelism looks for a reshape before a matmul.
        of_tokens = scale.view(*tensor.shape[:-1], 1) if over == -1 else scale
        data = cast(tensor, of_tokens, dtype)
        if ranks is None:
            return Float8Matrix.of(data.flatten(0, -2), scale)
        # Torch's fused gather refuses scales of a matrix's rows for parts of several sequences: they are sent as bytes.
        sent = data.view(torch.uint8) if over == -1 and ranks.by_sequence and tensor.shape[0] > 1 else data
        data = ranks.gather_tokens(sent).view(dtype).flatten(0, -2)
        return Float8Matrix.of(data, ranks.gather_tokens(of_tokens).flatten(0, -2) if over == -1 else scale)

    def quantize_dual(
        self, tensor: Tensor, dtype: torch.dtype, amax_reduce: AmaxReduce | None
    ) -> tuple[Float8Matrix, Float8Matrix]:
        """Cast a matrix [tokens, channels] to float8 twice: with row scales, and with column scales in transposed
        memory. With one scale per matrix, both have the same numbers. `amax_reduce` covers ranks that hold other
        channels of these tokens."""
        tensor = tensor.contiguous()
        if self.rowwise:
            of_rows, of_columns = dual_amax(tensor).split(list(tensor.shape))
            row_scale = self.scale_of_amax(of_rows[:, None], dtype, amax_reduce)
            column_scale = self.scale_of_amax(of_columns[None, :], dtype)
        else:
            row_scale = column_scale = self.scale_of_amax(amax_of(tensor, None), dtype, amax_reduce)
        rows, transposed = dual_cast(tensor, row_scale, column_scale, dtype)
        by_rows = Float8Matrix.of(rows, row_scale)
        if not self.rowwise:
            return by_rows, Float8Matrix(transposed.t(), by_rows.scale, by_rows.inverse)
        return by_rows, Float8Matrix.of(transposed.t(), column_scale)


def float8_linear(
    x: Tensor, weight: Tensor, scale: Tensor | None, recipe: Float8, quantized: Float8Weight | None = None
) -> Tensor:
    """Compute x · weightᵀ, [..., inputs] and [outputs, inputs]; `scale` is the whole weight's, if precomputed. The
    weight may already be quantized, by a float8 all-gather or as `quantized`; then `weight` only receives its
    gradient."""
    matrices = () if quantized is None else (*quantized.rows, *quantized.columns)
    return _Float8Linear.apply(x, weight, scale, recipe, *matrices)  # type: ignore[return-value]  # a Tensor


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, scale: Tensor | None, recipe: Float8, *quantized: Tensor
    ) -> Tensor:
        ctx.recipe, ctx.quantized = recipe, len(quantized) > 0  # torch 2.11 traces no bool of a tuple
        over, ranks = -1 if recipe.rowwise else None, recipe.gathers_input
        # Tensor parallelism shards the scope of an input scale if it shards the contracted dim.
        kept: tuple[Tensor, ...] = (x,)
        if ranks is None and recipe.dual_cast and not torch.compiler.is_compiling():
            left, kept = recipe.quantize_dual(x.reshape(-1, x.shape[-1]), E4M3, recipe.input_amax_reduce)
        else:
            left = recipe.quantize_tokens(x, E4M3, over, recipe.input_amax_reduce, ranks)
            if not recipe.rowwise:
                # Compiled backward casts again, in the kernel that recomputes the input, but gathers nothing again.
                again = torch.compiler.is_compiling() and ranks is None
                kept = (x, left.scale, left.inverse) if again else left
        if quantized:
            right = Float8Matrix(*quantized[:3])
        elif recipe.rowwise:
            right = recipe.quantize(weight, E4M3, -1, recipe.input_amax_reduce)
        else:
            right = _whole(weight, scale, recipe)
        ctx.save_for_backward(*(quantized[3:] or (weight, scale, None)), *kept)
        output = unflatten(multiply(left, right.t(), x.dtype, emulated=recipe.emulated, fast=True), x, ranks)
        return output if recipe.scatters_output is None else recipe.scatters_output.scatter_tokens(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        recipe: Float8 = ctx.recipe
        weight, scale, inverse, *x = ctx.saved_tensors
        gradient, ranks, kind = gradients[0], recipe.scatters_output, recipe.gradient_type
        by_rows = by_columns = x_grad = weight_grad = None
        needs_x_grad, needs_weight_grad = needs_input_grad(ctx)
        if ranks is None and recipe.dual_cast and needs_x_grad and needs_weight_grad:
            flat = gradient.reshape(-1, gradient.shape[-1])
            by_rows, by_columns = recipe.quantize_dual(flat, kind, recipe.output_amax_reduce)
        elif not recipe.rowwise:
            by_rows = by_columns = recipe.quantize_tokens(gradient, kind, None, recipe.output_amax_reduce, ranks)
        if needs_x_grad:
            left = by_rows or recipe.quantize_tokens(gradient, kind, -1, recipe.output_amax_reduce, ranks)
            if ctx.quantized:
                right = Float8Matrix(weight, scale, inverse)
            elif recipe.column_scales:
                right = recipe.quantize(weight, E4M3, 0, recipe.output_amax_reduce)
            else:
                right = _whole(weight, scale, recipe)
            x_grad = unflatten(multiply(left, right, gradient.dtype, emulated=recipe.emulated), gradient, ranks)
            x_grad = x_grad if recipe.gathers_input is None else recipe.gathers_input.scatter_tokens(x_grad)
        if needs_weight_grad:
            weight_grad = _gradient_of_weight(gradient, by_columns, x, recipe)
        return x_grad, weight_grad, None, None, *(None,) * (6 * ctx.quantized)


def _gradient_of_weight(gradient: Tensor, by_columns: Float8Matrix | None, x: list[Tensor], recipe: Float8) -> Tensor:
    """Weight gradient, which contracts all tokens. `x` is the input, followed by a known scale and its inverse, or its
    `Float8Matrix`."""
    rows = x[0].reshape(-1, x[0].shape[-1])
    if recipe.high_precision_weight_gradient:
        return torch.mm(gradient.reshape(-1, gradient.shape[-1]).t(), rows)
    left = by_columns or recipe.quantize_tokens(gradient, recipe.gradient_type, 0, None, recipe.scatters_output)
    if len(x) == 1:
        right = recipe.quantize_tokens(x[0], E4M3, 0, None, recipe.gathers_input)
    elif rows.dtype == E4M3:
        right = Float8Matrix(*x)
    else:
        # The expression differs from the forward's, whose result the compiler would keep beside its source.
        right = Float8Matrix(cast(rows.t(), x[1], E4M3).t(), *x[1:])
    return multiply(left.t(), right, gradient.dtype, emulated=recipe.emulated)


def unflatten(rows: Tensor, like: Tensor, ranks: TensorParallelCollectives | None = None) -> Tensor:
    """Shape rows like the leading dims of `like`; with `ranks`, its tokens are those of one rank."""
    if like.dim() == 2:
        return rows
    *batch, tokens = like.shape[:-1]
    return rows.unflatten(0, (*batch, tokens if ranks is None else tokens * ranks.degree))


def _whole(weight: Tensor, scale: Tensor | None, recipe: Float8) -> Float8Matrix:
    if isinstance(weight, Float8TrainingTensor):
        return Float8Matrix.of(weight._data, weight._scale)
    if scale is not None:
        return Float8Matrix.of(cast(weight, scale, E4M3), scale)
    return recipe.quantize(weight, E4M3, None, recipe.input_amax_reduce or recipe.output_amax_reduce)
