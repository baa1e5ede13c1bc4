"""Outputs of autograd functions, without no-op operators: after one, torch 2.11's compiler passes a zero gradient."""

import torch
from torch import Tensor


def in_type(out: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert the output of an autograd function to `dtype`; itself if it has it."""
    return out if out.dtype == dtype else out.to(dtype)


def dense(out: Tensor) -> Tensor:
    """Contiguous output of an autograd function; itself if it is contiguous."""
    return out if out.is_contiguous() else out.contiguous()
