"""Router of a mixture of experts: bias, load of the step before, counts, and what evaluation leaves alone."""

from dataclasses import replace

import pytest
import torch

from tests.config.composing import experiment
from titan_exp.models.blocks.feed_forward import Router
from titan_exp.models.qwen3_moe import Config
from titan_exp.models.spec.moe import MoEConfig, RouterSpec
from titan_exp.ops.moe.permutation import sort_by_expert

MODEL = experiment("model=qwen3_moe_debug").model
assert isinstance(MODEL, Config)
MOE = MODEL.moe


def router(moe: MoEConfig) -> Router:
    found = Router(RouterSpec("feed_forward.router", 16, 0.02, moe))
    with torch.no_grad():
        found.weight.copy_(torch.randn(found.weight.shape, generator=torch.Generator().manual_seed(1)))
    return found


def tokens(batch: int = 2, seq: int = 8) -> torch.Tensor:
    return torch.randn(batch, seq, 16, generator=torch.Generator().manual_seed(2))


def with_bias(*, centered: bool) -> MoEConfig:
    balance = replace(MOE.balance, loss="none", coefficient=0.0, bias_rate=0.25, centered_bias=centered)
    return replace(MOE, router_bias=True, score="sigmoid", balance=balance)


def test_the_bias_moves_towards_the_mean_load():
    counts = torch.tensor([10, 0, 4, 4, 4, 4, 4, 2])  # mean 4
    plain = router(with_bias(centered=False))
    plain.finish_step(counts)
    assert plain.bias.tolist() == [-0.25, 0.25, 0, 0, 0, 0, 0, 0.25]
    centered = router(with_bias(centered=True))
    centered.finish_step(counts)
    torch.testing.assert_close(centered.bias, plain.bias - plain.bias.mean())
    assert plain.counts.tolist() == [0] * 8


def test_counts_beyond_fp32_are_exact():
    plain = router(with_bias(centered=False))
    counts = torch.full((8,), 2**40)
    counts[3] += 1
    counts[5] -= 1
    plain.finish_step(counts)
    assert plain.bias.tolist() == [0, 0, 0, -0.25, 0, 0.25, 0, 0]


def test_the_bias_chooses_and_does_not_weigh():
    biased = router(with_bias(centered=False))
    unbiased = biased(tokens())
    biased.bias[5] = 100.0
    routing = biased(tokens())
    assert (routing.experts[:, 0] == 5).all()
    assert not (unbiased.experts[:, 0] == 5).all()
    # Three sigmoids divided by their sum.
    scores = (tokens().flatten(0, 1) @ biased.weight.T).sigmoid().gather(1, routing.experts)
    torch.testing.assert_close(routing.weights, scores / scores.sum(1, keepdim=True))


def test_only_training_counts():
    counted = router(MOE)
    with torch.no_grad():
        counted(tokens())
    assert int(counted.counts.sum()) == 0
    counted(tokens())
    assert int(counted.counts.sum()) == 2 * 8 * MOE.active_experts


def test_it_counts_by_the_sort_that_experts_need_or_each_sequence_by_itself():
    whole = router(replace(MOE, balance=replace(MOE.balance, loss="global_batch", coefficient=0.1)))
    each = router(replace(MOE, balance=replace(MOE.balance, loss="sequence", coefficient=0.1)))
    routing = whole(tokens())
    assert routing.order is not None
    assert each(tokens()).order is None
    expected = sort_by_expert(routing.experts, MOE.experts)
    assert all(torch.equal(mine, other) for mine, other in zip(routing.order, expected, strict=True))
    assert torch.equal(whole.counts, each.counts)


def test_the_load_of_the_step_before_is_the_share_of_choices():
    balanced = router(MOE)
    assert balanced.previous_load.tolist() == [1.0] * 8
    balanced.finish_step(torch.tensor([8, 0, 4, 4, 4, 4, 4, 4]))
    assert balanced.previous_load.tolist() == [2.0, 0.0, 1, 1, 1, 1, 1, 1]
    balanced.finish_step(torch.zeros(8, dtype=torch.int64))
    assert balanced.previous_load.tolist() == [0.0] * 8


@pytest.mark.parametrize("loss", ["switch", "sequence", "global_batch"])
def test_gradients_of_micro_batches_add_up(loss: str):
    """A naive mean over micro-batches is off by a multiple (facts: 272 %)."""
    balance = replace(MOE.balance, loss=loss, coefficient=1.0, z_loss=0.5)  # type: ignore[arg-type]
    whole, parts = router(replace(MOE, balance=balance)), router(replace(MOE, balance=balance))
    for found in (whole, parts):
        found.set_batch(4)
        if loss == "global_batch":
            found.previous_load.copy_(torch.tensor([2.0, 0.5, 0, 0, 1, 1.5, 2, 1]))
    x = tokens(4)
    # Only the attached losses: the weights' own gradient is zero.
    (whole(x).weights * 0).sum().backward()
    for part in x.split(1):
        (parts(part).weights * 0).sum().backward()
    assert whole.weight.grad is not None
    assert parts.weight.grad is not None
    assert float(whole.weight.grad.abs().max()) > 1e-3
    torch.testing.assert_close(parts.weight.grad, whole.weight.grad)
    torch.testing.assert_close(parts.losses, whole.losses)


def test_gradients_of_parts_of_sequences_add_up():
    balance = replace(MOE.balance, loss="sequence", coefficient=1.0, z_loss=0.5)
    moe = replace(MOE, balance=balance)
    x, whole = tokens(), router(moe)
    (whole(x).weights * 0).sum().backward()
    choices = torch.stack([row.bincount(minlength=8) for row in whole(x).experts.unflatten(0, (2, 8)).flatten(1)])
    split = router(moe)
    split.set_batch(1, 2, lambda counts: choices)
    for part in x.split(4, dim=1):
        (split(part).weights * 0).sum().backward()
    torch.testing.assert_close(split.weight.grad, whole.weight.grad)
