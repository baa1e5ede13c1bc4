"""Triton kernels of the loss against torch's operators, on logits that are hard for either."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.interpreted import DEVICES, needs_triton, run_kernels
from tests.patching import patch
from titan_exp.ops.cross_entropy import (
    BLOCK,
    IGNORE_INDEX,
    LossSum,
    VocabShard,
    has_row_kernels,
    linear_loss_sum,
    log_normalizer_and_target,
    loss_sum,
    row_statistics,
    write_logits_gradient,
)

pytestmark = needs_triton

VOCAB, FIRST = BLOCK + 904, 3000
"""Columns, in a whole block and a part of one; the second of two shards begins within the first block."""
DTYPES = (torch.bfloat16, torch.float32)
Z_LOSS = 0.01


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits and labels in both shards; rows that overflow without their maximum, and of mostly -inf."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, VOCAB, generator=generator) * 4
    logits[1] += 2000
    logits[2] -= 2000
    logits[3, 1:BLOCK] = -torch.inf
    logits[4, FIRST + 500] = 500
    labels = torch.randint(0, VOCAB, (12,), generator=generator)
    labels[0], labels[4], labels[5] = VOCAB - 1, FIRST + 500, FIRST - 1
    labels[6], labels[7], labels[8:10] = FIRST, 0, IGNORE_INDEX
    labels[3] = BLOCK + 7
    return logits.to(dtype), labels


def sharded(logits: Tensor, labels: Tensor, columns: slice | None) -> tuple[Tensor, VocabShard | None]:
    """Logits of a shard, and what it exchanges with the other one, whose numbers are torch's."""
    if columns is None:
        return logits, None
    first, end, _ = columns.indices(VOCAB)
    other = torch.ones(VOCAB, dtype=torch.bool, device=logits.device)
    other[columns] = False
    theirs = logits[:, other].float()
    elsewhere = (labels != IGNORE_INDEX) & ((labels < first) | (labels >= end))
    found = logits.float().gather(1, labels.clamp(min=0)[:, None])[:, 0]
    sums = torch.stack(
        (
            (theirs - logits.float().amax(-1, keepdim=True)).exp().sum(-1),
            torch.where(elsewhere, found, 0.0),
        )
    )
    return logits[:, columns].contiguous(), VocabShard(
        first, lambda own: own + sums, lambda own: own.maximum(theirs.amax(-1))
    )


def results(logits: Tensor, labels: Tensor, z_loss: float, columns: slice | None, scale: float) -> tuple[Tensor, ...]:
    """Log of the softmax denominator, the target's logit, and the gradient over the logits."""
    logits, shard = sharded(logits, labels, columns)
    log_z, chosen = log_normalizer_and_target(logits, labels.clamp(min=0), shard)
    write_logits_gradient(logits, log_z, labels, z_loss, shard, torch.tensor(scale, device=logits.device))
    predicted = labels != IGNORE_INDEX
    return log_z, chosen.where(predicted, 0), logits


def use_kernels() -> None:
    """In the loss of this process, also on a CPU."""
    patch("titan_exp.ops.cross_entropy.has_row_kernels", lambda _: lambda logits: True)


def compared(device: str) -> dict[str, list[tuple[Tensor, ...]]]:
    """Results of the kernels, of torch, and of torch on fp32 logits, by case."""
    cases = [
        (dtype, z_loss, columns)
        for dtype in DTYPES
        for z_loss, columns in ((0.0, None), (Z_LOSS, None), (Z_LOSS, slice(0, FIRST)), (Z_LOSS, slice(FIRST, VOCAB)))
    ]
    found: dict[str, list[tuple[Tensor, ...]]] = {}
    for dtype, z_loss, columns in cases:
        logits, labels = problem(dtype)
        found[f"{dtype}, {z_loss=}, {columns}"] = [
            results(given, labels, z_loss, columns, 0.3) for given in (logits.clone(), logits.float())
        ]
    use_kernels()
    for dtype, z_loss, columns in cases:
        logits, labels = problem(dtype)
        ours = results(logits.to(device), labels.to(device), z_loss, columns, 0.3)
        found[f"{dtype}, {z_loss=}, {columns}"].insert(0, tuple(part.cpu() for part in ours))
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_statistics_and_gradient_are_torchs(device: str):
    [found] = run_kernels(1, device, compared)
    assert len(found) == 8
    for name, (ours, torchs, in_fp32) in found.items():
        torch.testing.assert_close(ours[0], torchs[0], rtol=1e-6, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
        torch.testing.assert_close(ours[1], torchs[1], rtol=1e-6, atol=0, msg=lambda m, n=name: f"{n}: {m}")
        gradient, expected = ours[2], torchs[2]
        assert gradient.dtype == expected.dtype
        assert gradient.isfinite().all(), name
        assert gradient[8:10].count_nonzero() == 0
        if gradient.dtype == torch.float32:
            # An exponent of a few hundred is itself rounded to 1e-5.
            torch.testing.assert_close(gradient, expected, rtol=2e-4, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
        else:
            # Rounded to the nearest: only ties of fp32's last bits fall otherwise.
            torch.testing.assert_close(gradient, in_fp32[2].bfloat16(), rtol=2**-7, atol=1e-9)
            assert gradient.eq(in_fp32[2].bfloat16()).float().mean() > 0.99, name


class Storages(TorchDispatchMode):
    """Storages of at least some bytes that operators make, by operator."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.made = size, dict[int, str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().nbytes() >= self.size:
                place = leaf.untyped_storage().data_ptr()
                if place not in known:
                    self.made[len(self.made)] = str(func)
        return out


def losses(device: str) -> dict[str, Any]:
    """Sums, gradients, and operators that make large tensors, by case, of torch and of the kernels."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator) for shape in ((2, 24, 32), (512, 32)))
    labels = torch.randint(0, 512, (2, 24), generator=generator).to(device)
    labels[0, 3:7] = IGNORE_INDEX

    def chunked(chunk: int, hidden: Tensor, weight: Tensor) -> LossSum:
        return linear_loss_sum(hidden, weight, labels, chunk_tokens=chunk, z_loss=Z_LOSS)

    cases: dict[str, Callable[[Tensor, Tensor], LossSum]] = {
        "one chunk": lambda hidden, weight: chunked(48, hidden, weight),
        "chunks": lambda hidden, weight: chunked(17, hidden, weight),
        "whole": lambda hidden, weight: loss_sum(hidden @ weight.T, labels, Z_LOSS),
        "wider rows": lambda hidden, weight: loss_sum((hidden @ weight.T)[..., :500], labels % 500, Z_LOSS),
    }
    cases["without gradients"] = torch.no_grad()(cases["one chunk"])

    def run() -> dict[str, Any]:
        found = {}
        for name, loss in cases.items():
            inputs = [part.bfloat16().to(device).requires_grad_() for part in (hidden, weight)]
            with Storages(512 * 32 * 2 + 1) as large:
                sums = loss(*inputs)
                if sums.objective.requires_grad:
                    (sums.objective * 0.1).backward()
            gradients = [part.grad.cpu().float() for part in inputs if part.grad is not None]
            values = [part.detach().cpu() for part in sums if part is not None]
            found[name] = (values, gradients, list(large.made.values()))
        return found

    expected = run()
    use_kernels()
    return {name: (found, expected[name]) for name, found in run().items()}


@pytest.mark.parametrize("device", DEVICES)
def test_losses_and_gradients_are_torchs_without_copies_of_the_logits(device: str):
    [found] = run_kernels(1, device, losses)
    for name, ((sums, gradients, _), (expected, expected_gradients, _)) in found.items():
        assert len(gradients) == len(expected_gradients) == (0 if name == "without gradients" else 2)
        torch.testing.assert_close(sums, expected, rtol=1e-5, atol=0, msg=lambda m, n=name: f"{n}: {m}")
        for mine, theirs in zip(gradients, expected_gradients, strict=True):
            assert (mine - theirs).norm() < 3e-3 * theirs.norm(), name
    made = {name: ours[2] for name, (ours, _) in found.items()}
    assert made["one chunk"] == made["without gradients"] == ["aten.mm.default"]
    assert [name for name in made["whole"] if "mm" not in name] == ["aten.empty_like.default"]


def broken(device: str) -> list[Tensor]:
    """Logits; statistics of rows with NaN, with a label outside the vocabulary, all -inf, and -inf for a block."""
    logits, labels = problem(torch.float32)
    labels = labels.clamp(min=0)
    logits[0, 5], labels[1] = torch.nan, VOCAB
    logits[2] = logits[3, :BLOCK] = -torch.inf
    logits, labels = logits.to(device), labels.to(device)
    return [logits.cpu(), *(row_statistics(logits, labels, first).cpu() for first in (None, 0))]


@pytest.mark.parametrize("device", DEVICES)
def test_invalid_numbers_are_not_hidden(device: str):
    [[logits, whole, shard]] = run_kernels(1, device, broken)
    assert whole[1].isnan().tolist() == [True] + [False] * 11
    assert whole[2].isnan().tolist() == [False, True] + [False] * 10
    assert shard[2, 1] == 0, "another shard has it"
    assert shard[:2, 2].tolist() == [-torch.inf, 0], "adds nothing to the others"
    torch.testing.assert_close(whole[0, 3] + whole[1, 3].log(), logits[3].logsumexp(-1))


def test_they_take_what_they_support(monkeypatch: pytest.MonkeyPatch):
    def supported(stride: tuple[int, int] = (16, 1), device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> bool:
        with FakeTensorMode():
            return has_row_kernels(torch.empty_strided((8, 16), stride, device=device, dtype=dtype))

    assert supported()
    assert supported(dtype=torch.float32)
    assert supported(stride=(20, 1)), "columns of wider logits"
    assert not supported(stride=(1, 8))
    assert not supported(dtype=torch.float64)
    assert not supported(device="cpu")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not supported()
