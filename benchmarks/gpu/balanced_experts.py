"""Token exchange of balanced routing for a rank of expert parallelism alone, whose counts no other rank sends.

A fake process group receives nothing, and the stub device computes no counts. Plans assume that a rank receives as many
rows as it sends (`titan_exp.plan.trace.op_costs`); so does this exchange, on CUDA. Only sizes are right.
"""

import torch.distributed as dist
from torch import Tensor

from titan_exp.parallel.collectives import all_to_all_rows, group_named, return_rows


def balance_experts() -> None:
    """Exchange as many rows with each rank of a group from now on, whatever the counts on the device are."""
    for operator in (all_to_all_rows, return_rows):
        operator.register_kernel("cuda", _exchange)


def _exchange(rows: Tensor, sent: Tensor, received: Tensor, size: int | None, group: str) -> Tensor:
    found = rows.new_empty((rows.shape[0] if size is None else size, *rows.shape[1:]))
    parts = [balanced(tensor.shape[0], sent.shape[0]) for tensor in (found, rows)]
    dist.all_to_all_single(found, rows.contiguous(), *parts, group=group_named(group))
    return found


def balanced(rows: int, ranks: int) -> list[int]:
    """Numbers of rows for each rank, which differ by one at most."""
    return [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
