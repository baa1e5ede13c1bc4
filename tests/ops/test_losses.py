import jaxtyping
import pytest
import torch
import torch.nn.functional as F

from titan_exp.models.spec.tp_plan import Colwise, ReplicatedGateUp
from titan_exp.ops.cross_entropy import IGNORE_INDEX, cross_entropy_sum
from titan_exp.ops.swiglu import GROUP, swiglu
from titan_exp.parallel.tensor_parallel.layers import TensorParallelGroup
from titan_exp.parallel.tensor_parallel.styles import _gate_up_rows_of


def test_cross_entropy_sums_over_predicted_tokens():
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    labels[0, 2:4] = IGNORE_INDEX
    logs = logits.double().log_softmax(-1)
    expected = sum(-logs[b, s, labels[b, s]] for b in range(2) for s in range(5) if labels[b, s] != IGNORE_INDEX)
    found = cross_entropy_sum(logits, labels).double()
    torch.testing.assert_close(found, torch.as_tensor(expected), rtol=1e-6, atol=0)


def test_cross_entropy_of_nothing_is_zero_with_zero_gradient():
    logits = torch.randn(1, 3, 7, requires_grad=True)
    loss = cross_entropy_sum(logits, torch.full((1, 3), IGNORE_INDEX))
    loss.backward()
    assert logits.grad is not None
    assert loss.item() == 0
    assert logits.grad.abs().max() == 0


def test_cross_entropy_is_computed_in_fp32():
    logits, labels = torch.randn(1, 64, 300).bfloat16(), torch.randint(0, 300, (1, 64))
    assert cross_entropy_sum(logits, labels) == cross_entropy_sum(logits.float(), labels)


def test_swiglu_pairs_gate_and_up_group_by_group():
    gate, up = torch.randn(1, 2, 3 * GROUP), torch.randn(1, 2, 3 * GROUP)
    fused = torch.stack((gate.unflatten(-1, (3, GROUP)), up.unflatten(-1, (3, GROUP))), -2).flatten(-3)
    torch.testing.assert_close(swiglu(fused), F.silu(gate) * up)


@pytest.mark.parametrize(("channels", "degree"), [(160, 2), (160, 4), (160, 32), (160, 160), (96, 2), (2880, 16)])
def test_ranks_that_cut_through_groups_compute_their_channels(channels: int, degree: int):
    split = ReplicatedGateUp(GROUP, count="group")
    style = Colwise(channels // GROUP, split)
    assert style.divides(degree)
    assert style.is_replicated(degree)
    fused, share, used = torch.randn(1, 2, 2 * channels), channels // degree, []
    for rank in range(degree):
        region = TensorParallelGroup("", degree, rank, sequence=False)
        rows = list(_gate_up_rows_of(region, 2 * GROUP, style.units, split))
        own = torch.cat([fused[..., part] for part in rows], dim=-1)
        torch.testing.assert_close(swiglu(own, share), swiglu(fused)[..., rank * share : (rank + 1) * share])
        used += [row for part in rows for row in range(2 * channels)[part]]
    assert sorted(used) == list(range(2 * channels))


def test_shapes_are_checked_in_tests():
    with pytest.raises(jaxtyping.TypeCheckError):
        cross_entropy_sum(torch.zeros(2, 5, 7), torch.zeros(2, 4, dtype=torch.int64))
