"""Permutation of tokens to rows sorted by expert, the weighted sum back in a fixed order, and padding for experts.

Sums gather, so results and gradients are deterministic; scattering would need atomics on a GPU. Uncompiled on CUDA,
each direction is one Triton kernel that reads or writes each token once and each row once. A program handles one token;
the rows of its choices lie anywhere, and no other program touches them.

With padding, the number of each expert's rows is a multiple. Then elements that share a scale along tokens belong to
one expert, and kernels get the group sizes that they require. There is room for the worst case, so no count comes to
the host.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int32, Int64
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from titan_exp.ops.autograd import in_type, keep_unsaved, operator, unsaved_tensors
from titan_exp.ops.triton_kernels import jit, rounded, runs_kernel, tl

Choices = Int64[Tensor, "tokens k"]
Order = Int64[Tensor, " rows"]
Padding = Int64[Tensor, " padding"]
Tokens = Float[Tensor, "tokens dim"]
Rows = Float[Tensor, "rows dim"]
Weights = Float[Tensor, "tokens k"]

BLOCK = 1024  # columns per kernel program
TILE = 4096  # elements of each operand that a program of `combine`'s backward holds
_NARROW = 2**15  # number of experts up to which indices fit int16, which a radix sort orders in a quarter of the passes


def sort_by_expert(experts: Choices, count: int) -> tuple[Order, Choices, Int32[Tensor, " count"]]:
    """Sort choices by expert, then token; returns the order, its inverse, and the end of each expert's rows. Row i is
    choice `order[i]`, of token `order[i] // k`; `inverse` is the row of each choice. Choices of expert `count` or above
    come after the last end."""
    flat = experts.flatten().to(torch.int16 if count < _NARROW else torch.int64)
    by_expert, order = flat.sort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    expert = torch.arange(count, device=order.device, dtype=flat.dtype)
    ends = torch.searchsorted(by_expert, expert, right=True, out_int32=True)
    return order, inverse.view_as(experts), ends


@dataclass(frozen=True)
class PaddedOrder:
    """Order of the choices by expert, padded so that each expert's number of rows is a positive multiple."""

    order: Order  # choice of each row; 0 for padding
    inverse: Choices  # row of each choice
    ends: Int32[Tensor, " experts"]  # end of each expert's rows, padding included
    padding: Padding  # rows without a choice: those between experts, and those after the last end

    @staticmethod
    def sort(experts: Choices, count: int, multiple: int) -> "PaddedOrder":
        """Sort choices of `count` experts, padding each expert to a `multiple` of rows."""
        order, inverse, ends = sort_by_expert(experts, count)
        choices, starts = order.shape[0], torch.cat([ends.new_zeros(1), ends[:-1]])
        room = multiple * (-(-choices // multiple) + count)
        sizes = ((ends - starts + multiple - 1) // multiple).clamp(min=1) * multiple
        padded = sizes.cumsum(0, dtype=torch.int32)
        inverse = inverse + (padded - sizes - starts)[experts]
        # An expert's padding comes after its rows and all earlier ones; the last padding comes after all rows.
        number = torch.arange(room - choices, device=order.device)
        expert = torch.searchsorted(padded - ends, number.int(), right=True)
        padding = number + torch.cat([ends, ends.new_full((1,), choices)])[expert]
        order = order.new_zeros(room).scatter_(0, inverse.flatten(), torch.arange(choices, device=order.device))
        return PaddedOrder(order, inverse, padded, padding)


def permute(x: Tokens, order: Order, inverse: Choices, padding: Padding | None = None) -> Rows:
    """Copy each token to the rows of its choices, sorted by `sort_by_expert` or `PaddedOrder`; padding is zeros."""
    return _Permute.apply(x, order, inverse, padding)  # type: ignore[return-value]  # a Tensor


def combine(
    rows: Rows, order: Order, inverse: Choices, weights: Weights | None, padding: Padding | None = None
) -> Tokens:
    """Sum each token's rows with weights, in fp32 and in the order of its choices; a plain sum if `weights` is None.
    Backward keeps `rows` for the gradient of `weights`, and nothing for a plain sum (see `ops.swiglu`). The gradient of
    padding is zero."""
    return _Combine.apply(rows, order, inverse, weights, padding)  # type: ignore[return-value]  # a Tensor


def permute_weights(weights: Weights, order: Order, inverse: Choices) -> Float[Tensor, " rows"]:
    """Weight of each row."""
    return _PermuteWeights.apply(weights, order, inverse)  # type: ignore[return-value]  # a Tensor


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, padding: Tensor | None) -> Tensor:
        ctx.save_for_backward(inverse)
        if torch.compiler.is_compiling():
            # This reads k times as much as the kernel, but the partitioner may recompute it instead of keeping it.
            rows = x.index_select(0, order // inverse.shape[1])
            return rows if padding is None else rows.index_fill(0, padding, 0)
        return copy_tokens(x.contiguous(), inverse, padding)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        return sum_rows(gradients[0], inverse, None), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  # autograd functions take positional arguments
        ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, weights: Tensor | None, padding: Tensor | None
    ) -> Tensor:
        if weights is None and not torch.compiler.is_compiling():
            # Otherwise a recomputation would compute the rows again, or receive them.
            keep_unsaved(ctx, inverse, padding)
        else:
            ctx.save_for_backward(rows if weights is not None else None, inverse, padding, weights)
        return sum_rows(rows, inverse, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        rows, inverse, padding, weights = ctx.saved_tensors or (None, *unsaved_tensors(ctx), None)
        gradient = gradients[0].contiguous()
        if weights is None or rows is None:
            return copy_tokens(gradient, inverse, padding), None, None, None, None
        rows_grad, weights_grad = _combine_backward(rows.contiguous(), gradient, inverse, weights, padding)
        return rows_grad, None, None, weights_grad, None


class _PermuteWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return weights.take(order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        return gradients[0].take(inverse), None, None


def sum_rows(rows: Tensor, inverse: Tensor, weights: Tensor | None) -> Tensor:
    """Sum each token's rows. torch's operators are used here so that the compiler fuses them with their neighbours."""
    if torch.compiler.is_compiling():
        return _sum_choices(rows, inverse, weights)
    return _sum_rows_kernel(rows.contiguous(), inverse, weights)


def _sum_choices(rows: Tensor, inverse: Tensor, weights: Tensor | None) -> Tensor:
    total: Tensor | None = None
    for choice in range(inverse.shape[1]):
        part = in_type(rows.index_select(0, inverse[:, choice]), _sum_dtype(rows))
        part = part if weights is None else part * weights[:, choice, None]
        total = part if total is None else total + part
    assert total is not None, "a token has at least one expert"
    return in_type(total, rows.dtype)


def _sum_dtype(rows: Tensor) -> torch.dtype:
    return torch.promote_types(rows.dtype, torch.float32)


@operator("copy_tokens")
def copy_tokens(x: Tensor, inverse: Tensor, padding: Tensor | None) -> Tensor:
    """Copy tokens to the rows of their choices, without a gradient; padding is zeros."""
    rows = _empty_copies(x, inverse, padding)
    if padding is not None:
        rows.index_fill_(0, padding, 0)
    if runs_kernel(x):
        _launch(copy_tokens_kernel, x, inverse, rows, choices=inverse.shape[1], block=BLOCK)
        return rows
    if padding is not None:
        for choice in inverse.unbind(1):
            rows.index_copy_(0, choice, x)
        return rows
    # Rows written in order take a fraction of the time of copies that scatter them.
    token = torch.arange(inverse.shape[0], device=x.device).repeat_interleave(inverse.shape[1])
    of_rows = torch.empty_like(token).scatter_(0, inverse.flatten(), token)
    return torch.index_select(x, 0, of_rows, out=rows)


@operator("sum_rows", fake=lambda rows, inverse, _: rows.new_empty(inverse.shape[0], rows.shape[1]))
def _sum_rows_kernel(rows: Tensor, inverse: Tensor, weights: Tensor | None) -> Tensor:
    if not rows.is_cuda:
        # On a CPU this is one pass, with choices in order. Narrower rows would be summed in their dtype.
        wide = _sum_dtype(rows)
        factors = None if weights is None else weights.to(wide)
        return F.embedding_bag(inverse, rows.to(wide), mode="sum", per_sample_weights=factors).to(rows.dtype)
    out = rows.new_empty(inverse.shape[0], rows.shape[1])
    if runs_kernel(rows):
        operands = rows, rows if weights is None else weights.contiguous()
        choices = {"choices": inverse.shape[1], "weighted": weights is not None}
        _launch(sum_rows_kernel, out, inverse, *operands, **choices, block=BLOCK)
        return out
    total = torch.zeros_like(out, dtype=_sum_dtype(rows))
    for choice in range(inverse.shape[1]):
        part = rows.index_select(0, inverse[:, choice])
        total = total.add_(part) if weights is None else total.addcmul_(part, weights[:, choice, None])
    return out.copy_(total)


@operator("combine_backward")
def _combine_backward(
    rows: Tensor, gradient: Tensor, inverse: Tensor, weights: Tensor, padding: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of rows and weights from the gradient of the sum."""
    rows_grad, weights_grad = results = _empty_gradients(rows, gradient, inverse, weights, padding)
    if padding is not None:
        rows_grad.index_fill_(0, padding, 0)
    if runs_kernel(rows):
        choices = inverse.shape[1]
        padded = 1 << (choices - 1).bit_length()
        sizes = {"choices": choices, "padded": padded, "block": max(1, TILE // padded)}
        _launch(combine_backward_kernel, gradient, inverse, rows, weights.contiguous(), *results, **sizes)
        return rows_grad, weights_grad
    wide = gradient.to(_sum_dtype(rows))
    for choice in range(inverse.shape[1]):
        chosen = inverse[:, choice]
        rows_grad.index_copy_(0, chosen, (wide * weights[:, choice, None]).to(rows.dtype))
        torch.sum(wide * rows.index_select(0, chosen), dim=-1, out=weights_grad[:, choice])
    return rows_grad, weights_grad


@torch.library.register_fake("titan_exp::copy_tokens")
def _empty_copies(x: Tensor, inverse: Tensor, padding: Tensor | None) -> Tensor:
    return x.new_empty(inverse.numel() + (0 if padding is None else padding.shape[0]), x.shape[1])


@torch.library.register_fake("titan_exp::combine_backward")
def _empty_gradients(
    rows: Tensor, gradient: Tensor, inverse: Tensor, weights: Tensor, padding: Tensor | None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), weights.new_empty(weights.shape)


def _launch(kernel: Any, of_tokens: Tensor, inverse: Tensor, *others: Tensor, **constants: int | bool) -> None:
    """Launch a kernel for each token, and for each block of columns unless the kernel loops over them."""
    tokens, width = of_tokens.shape
    if isinstance(of_tokens, FakeTensor) or of_tokens.numel() == 0:
        return
    blocks = 1 if "padded" in constants else -(-width // constants["block"])
    kernel[tokens, blocks](of_tokens, inverse.contiguous(), *others, width, **constants)


@jit
def copy_tokens_kernel(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    x: tl.tensor, inverse: tl.tensor, rows: tl.tensor, width: tl.tensor, choices: tl.constexpr, block: tl.constexpr
) -> None:
    """Copy `block` columns of a token to the rows of its choices."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    numbers = tl.load(x + token * width + column, mask=column < width, other=0.0)
    for choice in tl.static_range(choices):  # type: ignore[misc]  # a loop of Triton
        row = tl.load(inverse + token * choices + choice)
        tl.store(rows + row * width + column, numbers, mask=column < width)


@jit
def sum_rows_kernel(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    out: tl.tensor,
    inverse: tl.tensor,
    rows: tl.tensor,
    weights: tl.tensor,
    width: tl.tensor,
    choices: tl.constexpr,
    weighted: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Sum `block` columns of a token's rows in fp32, in the order of its choices, times their weights if `weighted`."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros((block,), tl.float32)
    for choice in tl.static_range(choices):
        row = tl.load(inverse + token * choices + choice)
        numbers = tl.load(rows + row * width + column, mask=column < width, other=0.0).to(tl.float32)
        if weighted:
            numbers *= tl.load(weights + token * choices + choice)
        total += numbers
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out + token * width + column, rounded(total, dtype), mask=column < width)


@jit
def combine_backward_kernel(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    gradient: tl.tensor,
    inverse: tl.tensor,
    rows: tl.tensor,
    weights: tl.tensor,
    rows_grad: tl.tensor,
    weights_grad: tl.tensor,
    width: tl.tensor,
    choices: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Gradients of a token's rows and weights: its gradient times each weight, and its dot product with each row.
    `padded` is a power of two that is at least `choices`."""
    token = tl.program_id(0).to(tl.int64)
    choice = tl.arange(0, padded)
    chosen = choice < choices
    first = tl.load(inverse + token * choices + choice, mask=chosen, other=0)[:, None] * width
    weight = tl.load(weights + token * choices + choice, mask=chosen, other=0.0)[:, None]
    dtype: tl.constexpr = rows.dtype.element_ty  # type: ignore[attr-defined]  # pointers have it
    products = tl.zeros((padded, block), tl.float32)
    for start in range(0, width, block):
        column = start + tl.arange(0, block)
        inside = chosen[:, None] & (column < width)[None, :]
        upstream = tl.load(gradient + token * width + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
        offsets = first + column[None, :]
        products += upstream * tl.load(rows + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(rows_grad + offsets, rounded(upstream * weight, dtype), mask=inside)
    tl.store(weights_grad + token * choices + choice, tl.sum(products, 1), mask=chosen)


@dataclass(frozen=True)
class TokenPadding:
    """Padding of rows that are sorted by expert: positions in the padded buffer, and back."""

    ends: Tensor  # end of each expert's padded rows, int32 [experts]; every expert has some rows, if only zeros
    expert: Tensor  # expert of each padded row, [room]; the number of experts for padding after the last
    place: Tensor  # padded position of each row, [tokens]
    moved: Tensor  # True for rows that belong to an expert, [tokens]
    source: Tensor  # source row of each padded position, [room]
    filled: Tensor  # True for padded positions that hold a row, [room]

    @staticmethod
    def of(ends: Tensor, tokens: int, multiple: int) -> "TokenPadding":
        """Padding of `tokens` rows with int32 `ends` [experts], to a `multiple` of rows per expert."""
        experts, room = ends.shape[0], multiple * (-(-tokens // multiple) + ends.shape[0])
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        sizes = ((ends - starts + multiple - 1) // multiple).clamp(min=1) * multiple
        after = sizes.cumsum(0, dtype=torch.int32)
        # Distance by which each expert's rows move.
        shift = after - sizes - starts
        expert, expert_after = experts_of_rows(ends, tokens), experts_of_rows(after, room)
        row = torch.arange(tokens, device=ends.device)
        row_after = torch.arange(room, device=ends.device)
        mine, mine_after = expert.clamp(max=experts - 1), expert_after.clamp(max=experts - 1)
        moved, source = expert < experts, row_after - shift[mine_after]
        filled = (expert_after < experts) & (source < ends[mine_after])
        return TokenPadding(
            after, expert_after, (row + shift[mine]).where(moved, 0), moved, source.where(filled, 0), filled
        )

    def spread(self, rows: Tensor) -> Tensor:
        """Pad rows, [tokens, columns] to [room, columns]; differentiable."""
        return _Move.apply(rows, self.source, self.filled, self.place, self.moved)  # type: ignore[return-value]

    def collect(self, rows: Tensor) -> Tensor:
        """Remove the padding, [room, columns] to [tokens, columns]; zeros for rows of no expert; differentiable."""
        return _Move.apply(rows, self.place, self.moved, self.source, self.filled)  # type: ignore[return-value]


def experts_of_rows(ends: Tensor, rows: int) -> Tensor:
    """Expert of each row, int64 [rows]; the number of experts for rows after the last end."""
    return torch.searchsorted(ends, torch.arange(rows, device=ends.device, dtype=ends.dtype), right=True)


class _Move(torch.autograd.Function):
    """Gathers rows in both directions, since scattering would need atomics on a GPU."""

    @staticmethod
    def forward(  # noqa: PLR0917  # autograd functions take positional arguments
        ctx: Any, rows: Tensor, chosen: Tensor, kept: Tensor, back: Tensor, kept_back: Tensor
    ) -> Tensor:
        ctx.save_for_backward(back, kept_back)
        return _choose(rows, chosen, kept)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _choose(gradients[0], *ctx.saved_tensors), None, None, None, None


def _choose(rows: Tensor, chosen: Tensor, kept: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        # There may be no received rows, which the compiler cannot check: a row of zeros follows, without memory.
        rows = F.pad(rows, (0, 0, 0, 1))
    elif rows.shape[0] == 0:
        return rows.new_zeros(chosen.shape[0], rows.shape[1])
    return rows.index_select(0, chosen).masked_fill(~kept[:, None], 0)
