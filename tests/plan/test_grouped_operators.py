"""FLOPs of grouped matmuls: each row counts once, whatever the number of experts."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.plan.layouts import experiment_of, measured, predicted
from titan_exp.config.errors.user_error import UserError
from titan_exp.ops.moe.grouped_mm import grouped_linear
from titan_exp.plan.fake_kernels import fake_cuda_capability, fake_cuda_kernels
from titan_exp.plan.trace.op_costs import count_flops, is_unknown
from titan_exp.quantization import grouped_kernels
from titan_exp.quantization.recipes import needs_grouped_emulation

TOKENS, INPUTS, OUTPUTS = 40, 16, 24
ONE = 2 * TOKENS * INPUTS * OUTPUTS


class Count(TorchDispatchMode):
    """Records the FLOPs of every operator that has any."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        # As the planner does: the place of a tensor is not a computation.
        if func.namespace != "prim" and (flops := count_flops(func, args, kwargs or {}, out)):
            self.found.append((str(func._overloadpacket), flops))
        return out


def test_matmuls_in_bodies_of_operators_count():
    """Below autograd torch does not decompose them into `mm` and `bmm`."""
    left, right = torch.ones(2, 3, TOKENS, INPUTS), torch.ones(2, 3, INPUTS, OUTPUTS)
    for matmul, second in ((torch.matmul, right), (F.linear, torch.ones(OUTPUTS, INPUTS))):
        with torch._C._AutoDispatchBelowAutograd(), Count() as count:
            matmul(left, second)
        assert sum(flops for _, flops in count.found) == 6 * ONE


@pytest.mark.parametrize("experts", [1, 4])
@pytest.mark.parametrize("cuda", [False, True])
def test_each_row_counts_once(cuda: bool, experts: int):
    def empty(*size: int) -> Tensor:
        return torch.empty(*size, dtype=torch.bfloat16, requires_grad=True)

    with FakeTensorMode(), Count() as count:
        ends = torch.empty(experts, dtype=torch.int32)
        x, weight = empty(TOKENS, INPUTS), empty(experts, OUTPUTS, INPUTS)
        if cuda:
            with fake_cuda_kernels():
                torch.autograd.grad(grouped_linear(x, weight, ends).sum(), [x, weight])
        else:
            torch.autograd.grad(grouped_linear(x, weight, ends).sum(), [x, weight])
    names = ["titan_exp.grouped_rows"] * 2 + ["aten._grouped_mm" if cuda else "titan_exp.grouped_outer"]
    assert count.found == [(name, ONE) for name in names]


def test_other_grouped_matmuls():
    meta = torch.device("meta")
    float8 = torch.empty(TOKENS, INPUTS, dtype=torch.float8_e4m3fn, device=meta)
    right = torch.empty(4, INPUTS, OUTPUTS, dtype=torch.float8_e4m3fn, device=meta)
    assert count_flops(torch.ops.aten._scaled_grouped_mm.default, (float8, right), {}, None) == ONE
    # Groups of the other side are not what we have.
    assert count_flops(torch.ops.aten._grouped_mm.default, (right, float8.t()), {}, None) == 0
    assert is_unknown(torch.ops.aten._grouped_mm.default)


def test_flops_equal_torchs_counter():
    x, weight = torch.randn(TOKENS, INPUTS), torch.randn(4, OUTPUTS, INPUTS)
    rows = x.unflatten(0, (4, -1))
    with Count() as count:
        torch.bmm(rows, weight.mT)
        F.linear(x, weight[0])
    assert [flops for _, flops in count.found] == [ONE, ONE]


@pytest.mark.night
def test_experts_are_predicted_as_measured(tmp_path: Path):
    experiment = experiment_of(
        "model.architecture=tests.models.own_experts.Mixture parallelism.dp_shard=2 quantization=mxfp8 "
        "activation_checkpoint=full"
    )
    (guess,) = predicted(experiment, tmp_path / "plan")
    (fact,) = measured(experiment, tmp_path / "run")
    assert guess.flops == fact.flops > 0
    assert (guess.parameters, guess.gradients, guess.messages) == (fact.parameters, fact.gradients, fact.messages)
    assert guess.passing <= fact.passing <= 1.02 * guess.passing


def test_grouped_kernels_whose_casts_are_unknown_are_refused(monkeypatch: pytest.MonkeyPatch):
    config = experiment_of("quantization=float8_rowwise").quantization
    gpu = torch.device("cuda")
    with fake_cuda_capability((9, 0)):
        assert not needs_grouped_emulation(config, gpu)
    monkeypatch.setattr(grouped_kernels, "OF_TOKENS", {})
    with fake_cuda_capability((9, 0)), pytest.raises(UserError, match=r"torchao before 0\.18"):
        needs_grouped_emulation(config, gpu)
    with fake_cuda_capability((8, 0)):
        assert needs_grouped_emulation(config, gpu)
    with fake_cuda_capability((9, 0)):
        assert needs_grouped_emulation(experiment_of("quantization=float8_tensorwise").quantization, gpu)
