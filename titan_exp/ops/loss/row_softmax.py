"""Softmax statistics and gradient over rows of logits: one Triton kernel each, which reads logits in their own dtype.

Compiled losses do not use them; the compiler fuses torch's operators.
"""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from titan_exp.ops.runs_kernel import runs_kernel

BLOCK, WARPS = 4096, 8
"""Logits of a row that a kernel program computes at a time, and its warps: 16 logits a thread."""


def has_row_kernels(logits: Tensor) -> bool:
    """True if the kernels take these logits: as in `runs_kernel`, and columns adjacent."""
    return runs_kernel(logits) and logits.stride(-1) == 1


def row_statistics(
    logits: Float[Tensor, "tokens vocab"], target: Int[Tensor, " tokens"], first: int | None
) -> Float[Tensor, "3 tokens"]:
    """Maximum of each row, sum of exponentials relative to it, and the target's logit, in fp32.

    `first` is the first token id of a vocabulary shard, and targets in other shards get 0. It is None for the whole
    vocabulary, where a target outside gets NaN.
    """
    statistics = logits.new_empty(3, logits.shape[0], dtype=torch.float32)
    if isinstance(logits, FakeTensor):
        # Fake tensors have no values; the planner sees one call, and the bytes that the kernel reads and writes.
        torch.sum(logits, -1, dtype=torch.float32, out=statistics[0])
        return statistics
    from titan_exp.ops.loss.loss_kernels import row_statistics_kernel

    launch: Any = row_statistics_kernel[(logits.shape[0],)]
    launch(
        logits,
        target,
        *statistics,
        logits.stride(0),
        logits.shape[1],
        first or 0,
        math.nan if first is None else 0.0,
        block=BLOCK,
        num_warps=WARPS,
    )
    return statistics


def write_row_gradient(
    logits: Float[Tensor, "tokens vocab"],
    log_z: Float[Tensor, " tokens"],
    labels: Int[Tensor, " tokens"],
    factor: Float[Tensor, " tokens"],
    *,
    z_loss: float,
    first: int,
    out: Float[Tensor, "tokens vocab"],
) -> None:
    """Write the gradient of cross-entropy plus z-loss, times a factor per token, to `out`, which may be the logits.

    `log_z` and `factor` are in fp32. Labels outside the shard that starts at the token id `first` match no column.
    """
    if isinstance(logits, FakeTensor):
        torch.mul(logits, factor[:, None], out=out)  # as above
        return
    from titan_exp.ops.loss.loss_kernels import logits_gradient_kernel

    launch: Any = logits_gradient_kernel[(logits.shape[0],)]
    launch(
        logits,
        out,
        log_z,
        labels,
        factor,
        logits.stride(0),
        out.stride(0),
        logits.shape[1],
        first,
        z_loss,
        block=BLOCK,
        num_warps=WARPS,
    )
