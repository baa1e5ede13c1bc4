"""The loss in chunks against the whole one, and both against fp64 autograd."""

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titan_exp.ops.cross_entropy import (
    IGNORE_INDEX,
    chunk_loss,
    cross_entropy_sum,
    linear_loss_sum,
    loss_sum,
    write_logits_gradient,
)
from titan_exp.parallel.pipeline_stage import BackwardSplit

ROWS, SEQ, DIM, VOCAB = 2, 17, 24, 53
CHUNKS = [1, 5, 17, 34, 1000]


def problem(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, SEQ, DIM, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, DIM, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (ROWS, SEQ), generator=generator)
    labels[0, 3:7] = IGNORE_INDEX
    return hidden, weight, labels


def exact(scale: float, z_loss: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Objective and gradients in fp64, from the definition."""
    hidden, weight, labels = problem(dtype)
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    logits = (hidden @ weight.T).flatten(0, 1)
    labels = labels.flatten()
    log_z = logits.logsumexp(-1)
    predicted = labels != IGNORE_INDEX
    chosen = logits[torch.arange(len(labels)), labels.where(predicted, 0)]
    objective = ((log_z - chosen + z_loss * log_z**2) * predicted).sum()
    (scale * objective).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return objective.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("scale", [1.0, 10.0, 0.0, -0.25])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_values_and_gradients_are_those_of_fp64(chunk: int, scale: float, z_loss: float):
    hidden, weight, labels = problem()
    objective, cross_entropy, z = linear_loss_sum(hidden, weight, labels, chunk_tokens=chunk, z_loss=z_loss)
    (scale * objective).backward()
    expected, hidden_grad, weight_grad = exact(scale, z_loss)
    torch.testing.assert_close(objective.detach().double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(cross_entropy.double(), exact(1, 0)[0], rtol=1e-6, atol=0)
    assert (z is None) == (z_loss == 0)
    if z is not None:
        torch.testing.assert_close(cross_entropy + z, objective.detach())
    torch.testing.assert_close(hidden.grad, hidden_grad.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight.grad, weight_grad.float(), rtol=1e-4, atol=1e-5)
    assert (weight_grad.abs().max() > 0) == (scale != 0)


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_whole_logits_give_the_same(z_loss: float):
    hidden, weight, labels = problem()
    objective, cross_entropy, _ = loss_sum(hidden @ weight.T, labels, z_loss)
    objective.backward()
    expected, hidden_grad, weight_grad = exact(1, z_loss)
    torch.testing.assert_close(objective.detach().double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(weight.grad, weight_grad.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(hidden.grad, hidden_grad.float(), rtol=1e-4, atol=1e-5)
    assert not cross_entropy.requires_grad
    assert cross_entropy == cross_entropy_sum(hidden @ weight.T, labels).detach()


def test_in_bf16_it_is_as_close_to_the_truth_as_whole_logits_are():
    """The same matmuls in bf16, the same softmax in fp32; the weight's gradient is summed over chunks in fp32."""
    _, hidden_grad, weight_grad = exact(0.1, 0.01, torch.bfloat16)

    def errors(chunk: int | None) -> tuple[float, float]:
        hidden, weight, labels = problem(torch.bfloat16)
        if chunk is None:
            objective = loss_sum(hidden @ weight.T, labels, 0.01).objective
        else:
            objective = linear_loss_sum(hidden, weight, labels, chunk_tokens=chunk, z_loss=0.01).objective
        assert objective.dtype == torch.float32
        (objective * 0.1).backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        assert (hidden.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)
        return (
            float((hidden.grad.double() - hidden_grad).norm() / hidden_grad.norm()),
            float((weight.grad.double() - weight_grad).norm() / weight_grad.norm()),
        )

    whole = errors(None)
    assert max(whole) > 1e-4  # bf16 it is
    for chunk in CHUNKS:
        found = errors(chunk)
        assert found[0] < 1.3 * whole[0]
        assert found[1] < 1.3 * whole[1]


def test_many_chunks_lose_nothing_of_the_weights_gradient_in_bf16():
    """A sum of 2048 like terms in bf16 would stop growing at a few hundred."""
    hidden = torch.ones(1, 2048, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    linear_loss_sum(hidden, weight, torch.zeros(1, 2048, dtype=torch.int64), chunk_tokens=1).objective.backward()
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == [-1024.0, 1024.0]


def test_nothing_to_predict_is_no_loss_and_no_gradient():
    hidden, weight, labels = problem()
    objective, cross_entropy, z = linear_loss_sum(
        hidden, weight, torch.full_like(labels, IGNORE_INDEX), chunk_tokens=5, z_loss=0.1
    )
    objective.backward()
    assert z is not None
    assert (objective.item(), cross_entropy.item(), z.item()) == (0, 0, 0)
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.abs().max() == weight.grad.abs().max() == 0


def test_gradients_arrive_where_only_one_input_needs_them():
    hidden, weight, labels = problem()
    linear_loss_sum(hidden.detach(), weight, labels, chunk_tokens=5).objective.backward()
    assert hidden.grad is None
    torch.testing.assert_close(weight.grad, exact(1, 0)[2].float(), rtol=1e-4, atol=1e-5)


class LargestOutput(TorchDispatchMode):
    """Records which operators give a tensor of at least some size."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.large: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) and leaf.numel() >= self.elements for leaf in tree_leaves(out)):
            self.large.append(str(func))
        return out


@pytest.mark.parametrize("gradients", [True, False])
def test_no_tensor_of_all_logits_exists(gradients: bool):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 64, 8, generator=generator, requires_grad=True)
    weight = torch.randn(100, 8, generator=generator, requires_grad=True)
    labels = torch.randint(0, 100, (4, 64), generator=generator)
    # Larger than anything but all logits: weight 800, hidden states 2048, a chunk's logits 1600.
    with LargestOutput(2049) as seen, torch.set_grad_enabled(gradients):
        objective = linear_loss_sum(hidden, weight, labels, chunk_tokens=16, z_loss=0.1).objective
        if gradients:
            objective.backward()
    assert seen.large == []
    with LargestOutput(2049) as seen, torch.set_grad_enabled(gradients):
        loss_sum(hidden @ weight.T, labels)
    assert "aten.mm.default" in seen.large


class LiveLogits(TorchDispatchMode):
    """Largest number of chunks' logits in memory at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.live: list[StorageWeakRef] = []
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and out.shape[1] == VOCAB:
            self.live = [found for found in self.live if not found.expired()]
            self.live.append(StorageWeakRef(out.untyped_storage()))
            self.most = max(self.most, len(self.live))
        return out


def test_a_chunks_logits_are_freed_before_the_next_are_made():
    hidden, weight, labels = problem()
    with LiveLogits() as logits:
        linear_loss_sum(hidden, weight, labels, chunk_tokens=5).objective.backward()
    assert logits.most == 1


def test_without_gradients_none_are_computed():
    hidden, weight, labels = problem()
    with torch.no_grad():
        alone = linear_loss_sum(hidden, weight, labels, chunk_tokens=5, z_loss=0.1)
    assert not alone.objective.requires_grad
    with_gradients = linear_loss_sum(hidden, weight, labels, chunk_tokens=5, z_loss=0.1)
    assert alone.objective == with_gradients.objective.detach()
    assert alone.cross_entropy == with_gradients.cross_entropy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_overwrites_the_logits(dtype: torch.dtype):
    hidden, weight, labels = problem(dtype)
    logits = (hidden @ weight.T).detach().flatten(0, 1)
    exact_logits = logits.double().requires_grad_()
    chosen = torch.nn.functional.cross_entropy(exact_logits, labels.flatten(), reduction="sum")
    z = (exact_logits.logsumexp(-1).square() * (labels.flatten() != IGNORE_INDEX)).sum()
    (expected,) = torch.autograd.grad(chosen + 0.01 * z, exact_logits)
    found = chunk_loss(logits, labels.flatten(), 0.01, None)
    write_logits_gradient(logits, found.log_z, labels.flatten(), 0.01, None)
    torch.testing.assert_close(found.cross_entropy.double(), chosen.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(logits.double(), expected, rtol=5e-3 if dtype == torch.bfloat16 else 1e-4, atol=1e-6)


def test_the_loss_alone_leaves_the_logits():
    hidden, weight, labels = problem()
    logits = (hidden @ weight.T).detach().flatten(0, 1)
    before = logits.clone()
    chunk_loss(logits, labels.flatten(), 0.01, None)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("chunk", [17, 34])
def test_a_split_backward_pass_gives_both_gradients(chunk: int):
    """First for the input, then from the gradient that branches off for the weight, as zero-bubble schedules do."""
    hidden, values, labels = problem()
    input, weight = hidden.detach().requires_grad_(), nn.Parameter(values.detach())
    objective = linear_loss_sum(input * 1, weight, labels, chunk_tokens=chunk).objective * 0.3
    split = BackwardSplit(objective, input, [("head", weight)])
    input_gradient = split.compute_input_gradient(None)
    assert weight.grad is None
    split.add_weight_gradients()
    _, hidden_grad, weight_grad = exact(0.3, 0)
    torch.testing.assert_close(input_gradient, hidden_grad.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight.grad, weight_grad.float(), rtol=1e-4, atol=1e-5)


def test_overwritten_logits_are_not_taken_for_logits_again():
    hidden, weight, labels = problem()
    objective = linear_loss_sum(hidden, weight, labels, chunk_tokens=34).objective
    objective.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="overwritten"):
        objective.backward()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("chunk", [64, 256, 1000])
def test_on_a_gpu_the_weights_gradient_is_summed_in_fp32_by_the_matmul(chunk: int):
    generator = torch.Generator("cuda").manual_seed(0)
    make = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    hidden, weight = torch.randn(2, 500, 64, **make), torch.randn(512, 64, **make).requires_grad_()  # type: ignore[arg-type]
    labels = torch.randint(0, 512, (2, 500), generator=generator, device="cuda")
    linear_loss_sum(hidden, weight, labels, chunk_tokens=chunk).objective.backward()
    exact_weight = weight.detach().double().requires_grad_()
    loss_sum(hidden.double() @ exact_weight.T, labels).objective.backward()
    assert weight.grad is not None
    assert exact_weight.grad is not None
    error = (weight.grad.double() - exact_weight.grad).norm() / exact_weight.grad.norm()
    assert error < 0.01
