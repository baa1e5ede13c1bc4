import jaxtyping
import pytest
import torch
import torch.nn.functional as F

from titan_exp.ops.loss.cross_entropy import IGNORE_INDEX, cross_entropy_sum
from titan_exp.ops.swiglu import GROUP, swiglu


def test_cross_entropy_sums_over_predicted_tokens():
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    labels[0, 2:4] = IGNORE_INDEX
    logs = logits.double().log_softmax(-1)
    expected = sum(-logs[b, s, labels[b, s]] for b in range(2) for s in range(5) if labels[b, s] != IGNORE_INDEX)
    torch.testing.assert_close(cross_entropy_sum(logits, labels).double(), torch.as_tensor(expected))


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


def test_shapes_are_checked_in_tests():
    with pytest.raises(jaxtyping.TypeCheckError):
        cross_entropy_sum(torch.zeros(2, 5, 7), torch.zeros(2, 4, dtype=torch.int64))
