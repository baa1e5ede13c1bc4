"""The loss of a vocabulary divided among ranks is the loss of the whole one, in value and in gradient."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import run_ranks
from titan_exp.ops.cross_entropy import IGNORE_INDEX, LossSum, VocabShard, linear_loss_sum, loss_sum
from titan_exp.trainer.distributed import joined_process_group

VOCAB = 53
"""Three ranks hold 18, 18 and 17 of them."""
Z_LOSS, SCALE = 0.01, -2.5


def problem() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 17, 24, generator=generator)
    weight = torch.randn(VOCAB, 24, generator=generator)
    # Logits that softmax without its maximum would not survive.
    weight[40] *= 60
    labels = torch.randint(0, VOCAB, (2, 17), generator=generator)
    labels[0, 3:7] = IGNORE_INDEX
    return hidden, weight, labels


def whole() -> tuple[LossSum, Tensor, Tensor]:
    hidden, weight, labels = problem()
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = hidden @ weight.T
    chosen = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    z = (logits.logsumexp(-1).square() * (labels != IGNORE_INDEX)).sum()
    (SCALE * (chosen + Z_LOSS * z)).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return LossSum((chosen + Z_LOSS * z).detach(), chosen.detach()), hidden.grad, weight.grad


def of_a_rank(chunk_tokens: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def reduced(tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        result = tensor.clone()
        dist.all_reduce(result, operation)
        return result

    with joined_process_group(torch.device("cpu")):
        hidden, weight, labels = problem()
        first = dist.get_rank() * 18
        own = weight[first : first + 18].clone().requires_grad_()
        hidden.requires_grad_()
        part = VocabShard(
            first, partial(reduced, operation=dist.ReduceOp.SUM), partial(reduced, operation=dist.ReduceOp.MAX)
        )
        if chunk_tokens is None:
            sums = loss_sum(hidden @ own.T, labels, Z_LOSS, part)
        else:
            sums = linear_loss_sum(hidden, own, labels, chunk_tokens=chunk_tokens, z_loss=Z_LOSS, shard=part)
        (SCALE * sums.objective).backward()
        assert hidden.grad is not None
        assert own.grad is not None
        return sums.objective.detach(), sums.cross_entropy, hidden.grad, own.grad


@pytest.mark.parametrize("chunk_tokens", [None, 5, 1000])
def test_parts_make_the_whole(chunk_tokens):
    expected, by_hidden, by_weight = whole()
    ranks = run_ranks(3, of_a_rank, chunk_tokens)
    for objective, cross_entropy, _, _ in ranks:
        torch.testing.assert_close(objective.double(), expected.objective, rtol=1e-5, atol=0)
        torch.testing.assert_close(cross_entropy.double(), expected.cross_entropy, rtol=1e-5, atol=0)
    # What a rank computes of the hidden states' gradient is through its own words.
    torch.testing.assert_close(sum(rank[2] for rank in ranks), by_hidden.float(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(torch.cat([rank[3] for rank in ranks]), by_weight.float(), rtol=1e-4, atol=1e-3)
