"""Float8 weights of a whole model: one kernel for the amax of all of them, one for their casts to both layouts.

Both take tables of addresses, so the number of launches does not grow with the number of weights.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from titan_exp.ops.float8.cast import SIDE


def weights_amax(weights: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Amax of rows, [height, 1], and of columns, [1, width], of contiguous matrices of one dtype, fp32; on CUDA."""
    sizes = [size for weight in weights for size in weight.shape]
    # The bits of non-negative numbers order like integers.
    bits = weights[0].new_zeros(sum(sizes), dtype=torch.int32)
    parts = bits.view(torch.float32).split(sizes)
    rows, columns = parts[::2], parts[1::2]
    if isinstance(bits, FakeTensor):
        # Fake tensors have no values; the planner sees the bytes that the kernel reads.
        torch._foreach_norm(list(weights), torch.inf)
    else:
        from titan_exp.ops.float8.kernels import weights_amax_kernel

        _launch(weights_amax_kernel, [weights, rows, columns], source=weights[0])
    return [(row[:, None], column[None, :]) for row, column in zip(rows, columns, strict=True)]


def cast_weights(
    weights: Sequence[Tensor],
    row_scales: Sequence[Tensor],
    column_scales: Sequence[Tensor],
    rows: Sequence[Tensor],
    transposed: Sequence[Tensor],
    *,
    dtype: torch.dtype,
) -> None:
    """Round contiguous matrices of one dtype to `dtype`, scale and cast them to float8, into `rows` and `transposed`.

    fp32 scales are one per row or column of a matrix, or scalars, alike for all matrices; on CUDA.
    """
    if isinstance(weights[0], FakeTensor):
        # As above; the kernel reads the weights once and writes both layouts.
        torch._foreach_copy_(list(rows), list(weights))
        torch._foreach_zero_(list(transposed))
        return
    from titan_exp.ops.float8.kernels import cast_weights_kernel

    _launch(
        cast_weights_kernel,
        [weights, row_scales, column_scales, rows, transposed],
        source=weights[0],
        target=rows[0],
        largest=torch.finfo(rows[0].dtype).max,
        to_bf16=dtype == torch.bfloat16,
        one_row_scale=row_scales[0].dim() == 0,
        one_column_scale=column_scales[0].dim() == 0,
    )


def _launch(kernel: Any, tensors: Sequence[Sequence[Tensor]], **arguments: Any) -> None:
    """Launch a kernel over the tiles of the first of `tensors`, given the addresses of all."""
    weights = tensors[0]
    assert all(weight.is_contiguous() and weight.dtype == weights[0].dtype for weight in weights), "alike and dense"
    assert all(size % 16 == 0 for weight in weights for size in weight.shape), "checked by the rules"
    addresses = tuple(tuple(tensor.data_ptr() for tensor in column) for column in tensors)
    starts, table, programs = _table(addresses, tuple(tuple(weight.shape) for weight in weights), weights[0].device)
    kernel[(programs,)](starts, table, **arguments, weights=len(starts), side=SIDE)


@lru_cache(maxsize=8)
def _table(
    addresses: tuple[tuple[int, ...], ...], shapes: tuple[tuple[int, ...], ...], device: torch.device
) -> tuple[Tensor, Tensor, int]:
    """First tile of each matrix, padded to a power of two; addresses and shapes by matrix; number of tiles.

    Cached, because weights stay where they are: a copy to the device could wait for it.
    """
    starts = [0]
    for height, width in shapes:
        starts.append(starts[-1] + -(-height // SIDE) * -(-width // SIDE))
    programs = starts.pop()
    starts += [programs] * ((1 << (len(shapes) - 1).bit_length()) - len(shapes))
    rows = [[*found, *shape] for *found, shape in zip(*addresses, shapes, strict=True)]
    return torch.tensor(starts, device=device), torch.tensor(rows, device=device), programs
