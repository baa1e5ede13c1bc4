"""Functional collectives, which the compiler can trace, overlap, reorder and fuse."""

import torch
from torch import Tensor

_OPERATORS = torch.ops._c10d_functional


def all_gather(tensor: Tensor, degree: int, group: str) -> Tensor:
    """Concatenate the ranks' tensors [n, ...] to [degree · n, ...]."""
    return _OPERATORS.wait_tensor(_OPERATORS.all_gather_into_tensor(tensor.contiguous(), degree, group))


def reduce_scatter(tensor: Tensor, degree: int, group: str) -> Tensor:
    """This rank's part [n, ...] of the sum of the ranks' tensors [degree · n, ...]."""
    return _OPERATORS.wait_tensor(_OPERATORS.reduce_scatter_tensor(tensor.contiguous(), "sum", degree, group))


def all_reduce(tensor: Tensor, operation: str, group: str) -> Tensor:
    """`sum` or `max` of the ranks' tensors."""
    return _OPERATORS.wait_tensor(_OPERATORS.all_reduce(tensor.contiguous(), operation, group))
