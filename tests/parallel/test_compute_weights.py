"""bf16 compute weights beside fp32 masters, on one data rank."""

import pytest
import torch
from torch import nn

from tests.models.shapes import real_model
from titan_exp.optim.optimizer import cast_gradients
from titan_exp.parallel.compute_weights import ComputeWeights


class Tied(nn.Module):
    """Two modules with one weight, a frozen one, one that is used in fp32, and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.frozen, self.norm = nn.Linear(4, 4, bias=False), nn.LayerNorm(4)
        self.frozen.weight.requires_grad_(False)
        self.table = nn.Parameter(torch.arange(3), requires_grad=False)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of the outputs."""
        x = self.norm(self.second(self.first(x)))
        self.seen.append(x.dtype)
        return self.frozen(x).sum()


def weights(module: nn.Module, *, accumulate: bool = False, fixed: bool = False) -> ComputeWeights:
    return ComputeWeights([module], torch.bfloat16, fp32_modules=("norm",), accumulate=accumulate, fixed=fixed)


def test_copies_are_rounded_masters_in_use_and_masters_are_back_afterwards():
    module = Tied()
    before, compute = dict(module.named_parameters()), weights(module)
    assert set(compute.copies) == {module.first.weight, module.frozen.weight}
    with compute.in_use():
        assert module.first.weight is module.second.weight is compute.copies[before["first.weight"]]
        assert torch.equal(module.first.weight, before["first.weight"].bfloat16())
        assert module.norm.weight is before["norm.weight"]
        assert not module.frozen.weight.requires_grad
        assert module.table is before["table"]
    assert dict(module.named_parameters()) == before


def test_masters_are_back_after_an_error():
    module = real_model(vocab_size=64, tied_embeddings=True)
    before = dict(module.named_parameters())

    def fail() -> None:
        assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
        raise RuntimeError

    with pytest.raises(RuntimeError), ComputeWeights([module], torch.bfloat16).training():
        fail()
    assert all(it is before[name] for name, it in module.named_parameters())


@pytest.mark.parametrize("passes", [1, 3])
def test_gradients_are_those_of_bf16_weights_summed_in_fp32(passes: int):
    module = Tied()
    compute = weights(module, accumulate=passes > 1)
    inputs = [torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in range(passes)]
    with compute.training():
        for x in inputs:
            module(x).backward()
    assert module.seen == [torch.bfloat16] * passes
    found = module.first.weight.grad
    assert found is not None
    assert found.dtype == (torch.bfloat16 if passes == 1 else torch.float32)
    assert found.dtype == compute.gradient_dtype(module.get_parameter("first.weight"))
    assert module.frozen.weight.grad is None
    assert module.norm.weight.grad is not None
    expected = torch.zeros(4, 4)
    for x in inputs:
        with compute.in_use():
            weight = module.first.weight
            expected += torch.autograd.grad(module(x), weight)[0].float()
    assert torch.equal(found.float(), expected)
    cast_gradients(module.parameters())
    assert module.first.weight.grad is not None
    assert module.first.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_that_is_only_looked_up_has_no_copy(tied: bool, passes: int):
    """Its rows and gradient have the bits of a rounded copy's, whose gradient has the dtype of the copy."""
    module = real_model(vocab_size=64, tied_embeddings=tied)
    master = module.get_parameter("embedding.weight")
    compute = ComputeWeights([module], torch.bfloat16, accumulate=passes > 1)
    assert (master in compute.copies) == tied
    tokens = torch.randint(0, 64, (passes, 2, 16), generator=torch.Generator().manual_seed(0))
    rows, gradients = [], []
    module.get_submodule("embedding").register_forward_hook(lambda *found: rows.append(found[2]))
    with compute.training():
        for part in tokens:
            module(part).float().square().sum().backward()
    expected = torch.zeros(64, master.shape[1])
    for part, found in zip(tokens, rows[:: 1 + tied], strict=True):
        assert torch.equal(found, torch.nn.functional.embedding(part, master.bfloat16()))
    if not tied:
        for part in tokens:
            copy = master.detach().bfloat16().requires_grad_()
            with compute.in_use():
                hidden = torch.nn.functional.embedding(part, copy)
                given = hidden.detach().requires_grad_()
                module(given).float().square().sum().backward()
                hidden.backward(given.grad)
            assert copy.grad is not None
            gradients.append(copy.grad)
            expected += copy.grad.float()
        for leaf in module.parameters():
            leaf.grad = leaf.grad if leaf is master else None
        assert master.grad is not None
        assert master.grad.dtype == (torch.bfloat16 if passes == 1 else torch.float32)
        assert master.grad.dtype == compute.gradient_dtype(master)
        assert torch.equal(master.grad.float(), expected)


def test_refreshed_copies_stay_at_their_addresses():
    module = Tied()
    compute = weights(module)
    places = [copy.data_ptr() for copy in compute.copies.values()]
    with torch.no_grad():
        module.first.weight.mul_(3)
    (copy, _) = compute.copies.values()
    assert not torch.equal(copy, module.first.weight.bfloat16())
    compute.refresh()
    assert torch.equal(copy, module.first.weight.bfloat16())
    assert [it.data_ptr() for it in compute.copies.values()] == places


def test_fixed_sums_are_zeroed_where_they_are():
    module = Tied()
    compute = weights(module, accumulate=True, fixed=True)
    found = []
    for _ in range(2):
        with compute.training():
            module(torch.ones(2, 4, dtype=torch.bfloat16)).backward()
        assert module.first.weight.grad is not None
        found.append((module.first.weight.grad.data_ptr(), module.first.weight.grad.clone()))
        module.first.weight.grad = None
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


class Kept(nn.Linear):
    """A linear layer that computes with a kept double of its weight, of which it gives the gradient."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Doubles the input."""
        return _Kept.apply(input, self.weight)  # type: ignore[return-value]  # a Tensor


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, *gradients):
        (x,) = ctx.saved_tensors
        return gradients[0] * 2, gradients[0].t() @ x


@pytest.mark.parametrize("passes", [1, 3])
def test_weights_that_are_not_read_have_no_copies(passes: int):
    kept, tied, reads = Kept(4, 4, bias=False), Kept(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    tied.weight = reads.weight
    module = nn.Sequential(kept, tied, reads)
    compute = ComputeWeights([module], torch.bfloat16, accumulate=passes > 1, unread=[kept, tied])
    assert set(compute.copies) == {reads.weight}
    xs = [torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in range(passes)]
    with compute.training():
        assert (kept.weight.shape, kept.weight.dtype) == (torch.Size([4, 4]), torch.bfloat16)
        assert kept.weight.untyped_storage().nbytes() == 2
        assert kept.weight.isnan().all()
        assert tied.weight is reads.weight is next(iter(compute.copies.values()))
        for x in xs:
            kept(x).sum().backward()
    found = kept.weight.grad
    assert found is not None
    assert found.dtype == (torch.bfloat16 if passes == 1 else torch.float32)
    assert found.dtype == compute.gradient_dtype(kept.get_parameter("weight"))
    expected = [(torch.ones(3, 4).t() @ x.float()).bfloat16().float() for x in xs]
    assert torch.equal(found.float(), sum(expected, torch.zeros(4, 4)))
