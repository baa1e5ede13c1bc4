"""Token exchange through symmetric memory, over a plain implementation of what torch documents of its two operators."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.config.composing import experiment
from tests.parallel.test_expert_recompute import LAYERS, MODEL, parallel_model
from tests.patching import patch
from tests.ranks import run_ranks
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.models.spec.lookup import model_spec
from titan_exp.ops.autograd import local_tensor
from titan_exp.parallel.expert_parallel import (
    _BUFFERS,
    Received,
    SymmetricExchange,
    TokenExchange,
    expert_ends,
    use_symmetric_memory,
)
from titan_exp.parallel.symmetric_room import worst_case
from titan_exp.plan.devices import symmetric_memory
from titan_exp.trainer.distributed import joined_process_group

CPU = torch.device("cpu")
SYMMETRIC = "titan_exp.parallel.expert_parallel"


def everyone(*tensors: Tensor) -> list[Any]:
    """These tensors of every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, [tensor.clone() for tensor in tensors])
    return found


def all_to_all_vdev_2d(  # noqa: PLR0917  # torch's signature
    rows: Tensor, out: Tensor, splits: Tensor, placement: Tensor, group: str, major_align: int | None = None
) -> None:
    """Rank-major to expert-major; experts begin at multiples of the alignment, and have that much at least."""
    align, me, start = major_align or 1, dist.get_rank(), 0
    sent = everyone(rows, splits)
    local = len(splits) // len(sent)
    for expert in range(local):
        at = start
        for rank, (theirs, counts) in enumerate(sent):
            chosen = me * local + expert
            size, source = int(counts[chosen]), int(counts[:chosen].sum())
            out[at : at + size] = theirs[source : source + size]
            placement[:, expert * len(sent) + rank] = torch.tensor([size, at])
            at += size
        start += max(-(-(at - start) // align) * align, align)


def all_to_all_vdev_2d_offset(rows: Tensor, out: Tensor, placed: Tensor, placement: Tensor, group: str) -> None:
    """Expert-major to rank-major, from any offsets to dense rows."""
    me, at = dist.get_rank(), 0
    sent = everyone(rows, placed)
    local = placed.shape[1] // len(sent)
    for rank, (theirs, (sizes, starts)) in enumerate(sent):
        for expert in range(local):
            size, source = (int(of[expert * len(sent) + me]) for of in (sizes, starts))
            out[at : at + size] = theirs[source : source + size]
            placement[:, rank * local + expert] = torch.tensor([size, at])
            at += size


def uninitialized(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, group: str) -> Tensor:
    """Memory whose contents must not be read."""
    return torch.full(shape, torch.nan if dtype.is_floating_point else -(10**9), dtype=dtype, device=device)


def on_cpu() -> torch.library.Library:
    """Operators of symmetric memory on a CPU, as long as the result lives."""
    library = torch.library.Library("symm_mem", "IMPL")
    for operator in (all_to_all_vdev_2d, all_to_all_vdev_2d_offset):
        library.impl(operator.__name__, operator, "CPU")
    patch(f"{SYMMETRIC}.allocate", lambda _: uninitialized)
    patch("titan_exp.parallel.expert_parallel.use_symmetric_memory", lambda _: lambda: None)
    return library


def once(
    exchange: TokenExchange | SymmetricExchange, count: int, rank: int
) -> tuple[Received, Tensor, tuple[Tensor, ...]]:
    """Received rows, returned rows and gradients of an exchange of this rank's rows."""
    rows = (100 * rank + torch.arange(3 * count)).float().view(-1, 3).requires_grad_()
    weights = rows.detach()[:, 0].requires_grad_()
    received = exchange.dispatch(rows, weights)
    assert received.weights is not None
    back = exchange.give_back(received.rows * received.weights[:, None] + rank, received, rows.shape[0])
    return received, back, torch.autograd.grad(back, (rows, weights), back.detach())


def both_ways(chosen: list[list[int]], experts: int) -> list[tuple[Tensor, ...]]:
    """Received rows and weights without free ones, returned rows and gradients, of this rank by each exchange."""
    with joined_process_group(CPU):
        library, rank, ranks = on_cpu(), dist.get_rank(), dist.get_world_size()
        assert dist.group.WORLD is not None
        counts = torch.tensor([chosen[rank].count(expert) for expert in range(experts)])
        ends, group = counts.cumsum(0, dtype=torch.int32), dist.group.WORLD.group_name
        plain = TokenExchange.start(ends, ranks, group)()
        found = []
        for exchange in (plain, SymmetricExchange.start(ends, len(chosen[0]), 1, ranks, group)()):
            once(exchange, len(chosen[0]), rank)  # other ranks may still read what is sent first
            received, back, gradients = once(exchange, len(chosen[0]), rank)
            assert received.weights is not None
            taken = torch.ones(received.rows.shape[0], dtype=torch.bool)
            if isinstance(exchange, SymmetricExchange):
                taken = (received.rows != 0).any(1)
                assert isinstance(received.order, Tensor)
                sizes = received.order[0].view(-1, ranks).sum(1)
                starts = torch.cat([received.ends.new_zeros(1), received.ends[:-1]])
                assert taken.tolist() == [
                    any(start <= row < start + size for start, size in zip(starts, sizes, strict=True))
                    for row in range(received.rows.shape[0])
                ]
            kept = (received.rows[taken].detach(), received.weights[taken].detach())
            found.append((*kept, back.detach(), *gradients))
        del library
        return found


@pytest.mark.parametrize(
    "chosen",
    [
        [[0, 1, 2, 3], [3, 2, 1, 0]],
        [[0, 0, 0, 0], [0, 0, 0, 0]],  # all that a rank has room for
        pytest.param([[2, 2, 3, 3], [1, 1, 1, 1]], marks=pytest.mark.night),
        pytest.param([[0, 3, 5], [5, 5, 1], [4, 4, 4]], marks=pytest.mark.night),
    ],
)
def test_the_same_rows_as_by_all_to_all(chosen: list[list[int]]):
    """Bitwise in each direction, where rows that no rank has sent are not numbers."""
    for plain, symmetric in run_ranks(len(chosen), both_ways, chosen, 2 * len(chosen)):
        for expected, found in zip(plain, symmetric, strict=True):
            assert torch.equal(found, expected)


def gradients(*layout: str) -> tuple[float, dict[str, Tensor], int]:
    """Loss and gradients of two steps of a model, and its symmetric memory for rows and weights in bytes."""
    with joined_process_group(CPU):
        library, loss = on_cpu(), torch.zeros(())
        model = parallel_model("model.moe.shared_experts=1", *layout)
        for step in range(2):
            loss = model((torch.arange(64).view(2, 32) * (7 + step) + 31 * dist.get_rank()) % 320).square().mean()
            loss.backward()
        del library
        found = {name: local_tensor(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        buffers = (buffer for sets in _BUFFERS._sets.values() for kept in sets for buffer in kept)
        taken = sum(buffer.nbytes for buffer in buffers if buffer.is_floating_point())
        return loss.item(), found, taken


@pytest.mark.parametrize(
    "layout",
    [
        "",
        pytest.param("activation_checkpoint=full", marks=pytest.mark.night),
        pytest.param("compile=blocks compile.backend=aot_eager", marks=pytest.mark.night),
        pytest.param("compile=blocks compile.backend=aot_eager activation_checkpoint=full", marks=pytest.mark.night),
    ],
)
def test_a_model_has_the_same_gradients(layout: str):
    """And as much symmetric memory as a plan says."""
    symmetric = "parallelism.token_exchange=symmetric_memory"
    results = run_ranks(2, gradients, symmetric, *layout.split(), limit=300)
    batch = ("training.seq_len=32", "training.micro_batch_size=2", "training.global_batch_size=4")
    run = experiment(*MODEL, *batch, symmetric)
    planned = symmetric_memory(ResolvedLayout.of(run), model_spec(run.model))
    for (loss, found, taken), (expected_loss, expected, none) in zip(results, run_ranks(2, gradients), strict=True):
        assert (taken, none) == (planned, 0)
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        assert found.keys() == expected.keys()
        assert len(expected) > LAYERS
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, msg=lambda m, n=name: f"{n}: {m}")


def test_ends_take_in_the_free_row_of_an_expert_without_tokens():
    placement = torch.tensor([[2, 1, 0, 0, 0, 4], [0, 2, 3, 3, 4, 4]])
    assert expert_ends(placement, 2).tolist() == [3, 4, 8]


def test_there_is_room_for_all_tokens_of_the_group():
    """Of eight choices a rank of four experts gets at most four."""
    assert worst_case(tokens=10, choices=2, local_experts=4, ranks=3) == 64
    assert worst_case(tokens=10, choices=8, local_experts=4, ranks=3) == 124


def test_without_nvshmem_it_says_so():
    if torch.version.cuda is not None:
        pytest.skip("torch for CUDA brings it along")
    with pytest.raises(UserError, match="token_exchange=all_to_all"):
        use_symmetric_memory()


def on_gpus() -> tuple[list[Tensor], list[Tensor]]:
    """Returned rows and gradients by all-to-all, and by symmetric memory, five times over."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    with joined_process_group(device):
        use_symmetric_memory()
        assert dist.group.WORLD is not None
        rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
        results: tuple[list[Tensor], list[Tensor]] = ([], [])
        for seed in range(5):
            generator = torch.Generator().manual_seed(10 * seed + rank)
            counts = torch.randint(0, 8, (512,), generator=generator).bincount(minlength=8).to(device)
            values = torch.randn(512, 256, generator=generator).bfloat16().to(device)
            ends = counts.cumsum(0, dtype=torch.int32)
            starts: list[Callable[[], Any]] = [
                TokenExchange.start(ends, ranks, group),
                SymmetricExchange.start(ends, 512, 1, ranks, group),
            ]
            for start, found in zip(starts, results, strict=True):
                rows, weights = values.clone().requires_grad_(), values[:, 0].float().requires_grad_()
                exchange = start()
                received = exchange.dispatch(rows, weights)
                back = exchange.give_back(received.rows * received.weights[:, None].bfloat16(), received, 512)
                found += [back, *torch.autograd.grad(back, (rows, weights), back.detach())]
        return tuple([tensor.detach().cpu() for tensor in found] for found in results)  # type: ignore[return-value]


@pytest.mark.cuda
def test_two_gpus_exchange_the_same_rows():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for plain, symmetric in run_ranks(2, on_gpus, limit=300):
        assert all(map(torch.equal, symmetric, plain))
