"""Fake CUDA kernels: allocations within a call."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.ranks import run_ranks

HALF, SINGLE = 2, 4
"""Bytes of a number."""


def test_kernels_allocate_as_on_a_gpu():
    [(dense, strided, backward, attention)] = run_ranks(1, allocations_of_kernels)
    x, row = 4 * 8 * 16 * HALF, 4 * 8 * SINGLE
    # A norm copies queries among projected heads, in each pass, and keeps the mean squares.
    assert dense == [x, row]
    assert strided == [x, x, -x, row]
    assert backward == [x, x, -x, 16 * HALF]
    # Workspaces are blocks of their own: sums of rows, fp32 gradients of queries, and keys and values per query head.
    rows, shared = 2 * 4 * 128, 2 * 4 * 128 * 32 * HALF
    workspaces = [rows * SINGLE, rows * 32 * SINGLE, shared, shared]
    within = [*workspaces, *(-size for size in reversed(workspaces))]
    assert within in [attention[at : at + len(within)] for at in range(len(attention))]


def allocations_of_kernels() -> list[list[int]]:
    """Bytes allocated, or released if negative, by a norm of dense and of strided rows, its backward pass, and by
    attention's."""
    from titan_exp.plan.fake_kernels import fake_cuda_kernels, workspaces
    from titan_exp.plan.trace.dispatch_mode import CostMode
    from titan_exp.plan.trace.memory_tracker import MemoryTracker

    axes = SimpleNamespace(mesh_dim_names=())
    mesh: Any = SimpleNamespace(world=axes, sharding=axes, experts=None)
    out: list[Tensor] = []

    def allocations(call: Callable[[], object]) -> list[int]:
        tracker = MemoryTracker()
        with CostMode(tracker, mesh, workspaces):
            kept = call()
            found, sizes = [], dict[int, int]()
            for storage, size, _ in tracker.events()[1]:
                found.append(size or -sizes[storage])
                sizes[storage] = size
        del kept
        return found

    with FakeTensorMode(), fake_cuda_kernels():
        heads = torch.empty(4, 8, 3, 16, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(16, dtype=torch.bfloat16, requires_grad=True)
        norm, queries = lambda x: F.rms_norm(x, (16,), weight, 1e-5), heads.detach()[:, :, 0].requires_grad_()
        dense = queries.contiguous()
        gradient = torch.empty_like(dense)
        query, key = (torch.empty(2, n, 128, 32, dtype=torch.bfloat16, requires_grad=True) for n in (4, 2))
        return [
            allocations(lambda: norm(dense)),
            allocations(lambda: out.append(norm(queries))),
            allocations(lambda: torch.autograd.grad(out[0], [queries, weight], gradient)),
            allocations(
                lambda: torch.autograd.grad(
                    F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True).sum(), [query, key]
                )
            ),
        ]
