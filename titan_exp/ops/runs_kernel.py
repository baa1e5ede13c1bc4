"""Choice between our Triton kernels and torch's operators."""

from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from titan_exp.config.machine.devices import has_triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that fp32 arithmetic serves."""


def runs_kernel(tensor: Tensor) -> bool:
    """True if a Triton kernel computes on `tensor`: on CUDA and uncompiled, since the compiler fuses torch's operators.

    Fake tensors stand for those of a GPU, whose torch brings Triton.
    """
    if torch.compiler.is_compiling() or not tensor.is_cuda or tensor.dtype not in DTYPES:
        return False
    # Subclasses, such as DTensor, have operators of their own.
    return type(tensor) is FakeTensor or (type(tensor) is Tensor and _has_triton())


_has_triton = cache(has_triton)
