"""Linear attention in the planner: torch's operators are counted one by one, fla-core's kernels and long sequences by
their formula."""

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
from titan_exp.plan.trace.op_costs import ATTENTION, ATTENTION_BACKWARD
from titan_exp.plan.trace.torch_patches import OpCache


@pytest.fixture(autouse=True)
def _no_operators_of_another_fake_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_mode, "_OP_CACHE", OpCache())


def costs(backend: LinearAttentionBackend, seq: int = 100) -> tuple[Any, int]:
    """Costs of forward and backward, and FLOPs by the formulas."""
    shape = (2, seq, 4, 16)
    axes = SimpleNamespace(mesh_dim_names=())
    mesh: Any = SimpleNamespace(world=axes, sharding=axes, experts=None)
    operators = torch.ops.titan_exp.linear_attention.default, torch.ops.titan_exp.linear_attention_backward.default
    with FakeTensorMode():
        q, k, v = (torch.empty(shape, requires_grad=True) for _ in range(3))
        g, beta = (torch.empty(shape[:3], requires_grad=True) for _ in range(2))
        state, gradient = torch.empty(2, 4, 16, 16), torch.empty(shape)
        with CostMode(MemoryTracker(), mesh) as mode:
            out, last = gated_delta(q, k, v, g, beta, None, state=state, backend=backend)
            torch.autograd.grad((out, last), (q, k, v, g, beta), (gradient, state))
        given = (q, k, v, g, beta, state, None, 64, backend)
        formulas = zip(operators, (given, (gradient, state, *given)), strict=True)
        return mode.costs, sum(matmul_flops(operator, args, {}, (out, last)) or 0 for operator, args in formulas)


@pytest.mark.parametrize("backend", ["torch", "fla"])
def test_flops_are_those_of_the_formulas(backend: LinearAttentionBackend):
    found, formula = costs(backend)
    assert found.flops == formula > 0
    attention = {name: count for (name, measure), count in found.kernels.items() if measure == "flops"}
    if backend == "fla":
        assert attention.keys() == {ATTENTION, ATTENTION_BACKWARD}
        assert found.kernels[ATTENTION, "launches"] == found.kernels[ATTENTION_BACKWARD, "launches"] == 1


def test_many_chunks_are_not_traced_one_by_one(monkeypatch: pytest.MonkeyPatch):
    counted, formula = costs("torch", 9 * 64)
    monkeypatch.setattr("titan_exp.ops.linear_attention.TRACED_CHUNKS", 9)
    traced, _ = costs("torch", 9 * 64)
    assert counted.flops == traced.flops == formula > 0
    launches = [sum(n for (_, measure), n in one.kernels.items() if measure == "launches") for one in (counted, traced)]
    assert launches[0] < launches[1] / 10
