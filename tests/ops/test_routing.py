"""Routing of tokens to experts: choice, groups, ties, weights, counts, and the losses that balance them."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from titan_exp.ops.moe.routing import (
    add_unless_recomputing,
    attach_loss,
    batch_balance_loss,
    choices_per_expert,
    choose_experts,
    expert_weights,
    normalized_scores,
    router_scores,
    router_z_loss,
    sequence_balance_loss,
)


def scores(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(3))


def test_the_lowest_index_wins_at_ties():
    equal = torch.tensor([[0.5, 0.7, 0.5, 0.7, 0.5, 0.1]])
    assert choose_experts(equal, 4).tolist() == [[1, 3, 0, 2]]
    many = torch.zeros(3, 256)
    assert choose_experts(many, 8).tolist() == [list(range(8))] * 3
    assert choose_experts(many, 2, groups=4, active_groups=2, top2_groups=True).tolist() == [[0, 1]] * 3


@pytest.mark.parametrize("shift", [0.0, -1.0], ids=["positive", "negative, as of biased scores"])
@pytest.mark.parametrize("top2", [False, True])
def test_experts_of_the_best_groups(top2: bool, shift: float):
    found = choose_experts(given := scores(50, 16) + shift, 3, groups=4, active_groups=2, top2_groups=top2)
    for row, chosen in zip(given.tolist(), found.tolist(), strict=True):
        groups = [row[start : start + 4] for start in range(0, 16, 4)]
        of_group = [sum(sorted(group)[-2:]) if top2 else max(group) for group in groups]
        best = sorted(range(4), key=lambda group: -of_group[group])[:2]
        allowed = [expert for expert in range(16) if expert // 4 in best]
        assert chosen == sorted(allowed, key=lambda expert: -row[expert])[:3]


def test_a_group_by_its_two_best_is_another_group_than_by_its_best():
    given = torch.tensor([[0.9, 0.0, 0.6, 0.6]])
    assert choose_experts(given, 2, groups=2, active_groups=1, top2_groups=False).tolist() == [[0, 1]]
    assert choose_experts(given, 2, groups=2, active_groups=1, top2_groups=True).tolist() == [[2, 3]]


def test_weights_are_scores_of_the_choice():
    given = scores(7, 8)
    chosen = choose_experts(given, 3)
    plain = expert_weights(given, chosen, normalized=False, scale=16.0)
    assert torch.equal(plain, given.gather(1, chosen) * 16)
    shares = expert_weights(given, chosen, normalized=True, scale=2.5)
    torch.testing.assert_close(shares.sum(1), torch.full((7,), 2.5))
    nothing = expert_weights(torch.zeros(1, 8), torch.tensor([[0, 1]]), normalized=True, scale=1.0)
    assert nothing.tolist() == [[0.0, 0.0]]


def test_scores_are_fp32():
    logits = torch.randn(5, 8).bfloat16()
    assert torch.equal(router_scores(logits, sigmoid=False), logits.float().softmax(-1))
    assert torch.equal(router_scores(logits, sigmoid=True), logits.float().sigmoid())


def test_choices_are_counted_per_row():
    chosen = torch.tensor([[0, 2, 2, 5], [5, 5, 5, 5]])
    assert choices_per_expert(chosen, 6).tolist() == [[1, 0, 2, 0, 0, 1], [0, 0, 0, 0, 0, 4]]
    assert choices_per_expert(torch.zeros(2, 0, dtype=torch.int64), 3).tolist() == [[0, 0, 0]] * 2


def test_a_balanced_sequence_costs_one():
    experts, length, k = 8, 16, 2
    given = normalized_scores(torch.ones(3, length, experts))
    choices = torch.full((3, experts), length * k // experts)
    assert float(sequence_balance_loss(given, choices, length)) == pytest.approx(3 * k)
    assert float(batch_balance_loss(given, torch.ones(experts))) == pytest.approx(3 * length)


def test_the_loss_of_a_sequence_is_the_sum_over_its_parts():
    given = normalized_scores(scores(2, 12, 8))
    choices = choices_per_expert(choose_experts(given, 2).flatten(1), 8)
    whole = sequence_balance_loss(given, choices, 12)
    parts = sum(sequence_balance_loss(part, choices, 12) for part in given.split((5, 7), dim=1))
    assert float(parts) == pytest.approx(float(whole))
    # By hand: experts · Σ (share of choices per token) · (mean score).
    by_hand = sum(8 * float((choices[row] / 12 * given[row].mean(0)).sum()) for row in range(2))
    assert float(whole) == pytest.approx(by_hand)


def test_z_loss_is_the_square_of_the_log_of_the_partition_function():
    logits = torch.randn(2, 3, 4)
    by_hand = sum(float(torch.tensor([float(x.exp()) for x in row]).sum().log()) ** 2 for row in logits.flatten(0, 1))
    assert float(router_z_loss(logits)) == pytest.approx(by_hand, rel=1e-5)


def test_an_attached_loss_has_gradient_one():
    weight = torch.tensor(3.0, requires_grad=True)
    x = torch.randn(4, requires_grad=True)
    (attach_loss(x, weight.square()) * 1000).sum().backward()
    assert weight.grad is not None
    assert float(weight.grad) == 6.0
    assert x.grad is not None
    assert x.grad.tolist() == [1000.0] * 4


@pytest.mark.parametrize("compiled", [False, True])
def test_recomputation_is_not_counted(compiled: bool):
    total = torch.zeros(3, dtype=torch.int64)

    def layer(x: torch.Tensor) -> torch.Tensor:
        add_unless_recomputing(total, torch.tensor([1, 2, 3]))
        return x.sin().square()

    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    x = torch.randn(5, requires_grad=True)
    checkpoint(run, x, use_reentrant=False).sum().backward()
    assert total.tolist() == [1, 2, 3]
