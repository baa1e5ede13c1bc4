"""Linear attention in the planner: torch's operators are counted one by one, fla-core's kernels by their formula."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from titan_exp.ops.linear_attention import LinearAttentionBackend, gated_delta
from titan_exp.ops.matmul_flops import matmul_flops
from titan_exp.plan.trace import dispatch_mode
from titan_exp.plan.trace.dispatch_mode import CostMode
from titan_exp.plan.trace.memory_tracker import MemoryTracker
from titan_exp.plan.trace.op_cache import OpCache
from titan_exp.plan.trace.op_costs import ATTENTION, ATTENTION_BACKWARD

SHAPE = (2, 100, 4, 16)


def costs(backend: LinearAttentionBackend) -> tuple[Any, int]:
    """Costs of forward and backward, and FLOPs by the formulas."""
    axes = SimpleNamespace(mesh_dim_names=())
    mesh: Any = SimpleNamespace(world=axes, sharding=axes, experts=None)
    operators = torch.ops.titan_exp.linear_attention.default, torch.ops.titan_exp.linear_attention_backward.default
    with FakeTensorMode():
        q, k, v = (torch.empty(SHAPE, requires_grad=True) for _ in range(3))
        g, beta = (torch.empty(SHAPE[:3], requires_grad=True) for _ in range(2))
        state, gradient = torch.empty(2, 4, 16, 16), torch.empty(SHAPE)
        with CostMode(MemoryTracker(), mesh) as mode:
            out, last = gated_delta(q, k, v, g, beta, None, state=state, backend=backend)
            torch.autograd.grad((out, last), (q, k, v, g, beta), (gradient, state))
        given = (q, k, v, g, beta, state, None, 64, backend)
        formulas = zip(operators, (given, (gradient, state, *given)), strict=True)
        return mode.costs, sum(matmul_flops(operator, args, {}, (out, last)) or 0 for operator, args in formulas)


@pytest.mark.parametrize("backend", ["torch", "fla"])
def test_flops_are_those_of_the_formulas(backend: LinearAttentionBackend, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch_mode, "_OP_CACHE", OpCache())  # the process may have another fake mode's
    found, formula = costs(backend)
    assert found.flops == formula > 0
    attention = {name: count for (name, measure), count in found.kernels.items() if measure == "flops"}
    if backend == "fla":
        assert attention.keys() == {ATTENTION, ATTENTION_BACKWARD}
        assert found.kernels[ATTENTION, "launches"] == found.kernels[ATTENTION_BACKWARD, "launches"] == 1
