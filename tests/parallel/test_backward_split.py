"""A backward pass in two gives what one gives, and its first part leaves the weights alone."""

from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from titan_exp.parallel import pipeline_stage
from titan_exp.parallel.pipeline_stage import NODES_LIVE_ALONE, BackwardSplit


class TwoOutputs(torch.autograd.Function):
    """x @ w and w.sum(), from one operator written in Python."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w, w.sum()

    @staticmethod
    def backward(ctx, *gradients):
        by_product, by_sum = gradients
        x, w = ctx.saved_tensors
        return by_product @ w.T, x.T @ by_product + by_sum


class Stage(nn.Module):
    """Weights behind each other, in the residual stream and in an operator with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)
        self.own = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.last(self.first(self.norm(x)).relu())
        product, total = TwoOutputs.apply(x, self.own)  # type: ignore[misc]
        return product * total


@pytest.mark.parametrize("objective", [True, False])
def test_it_adds_what_one_backward_pass_adds(objective: bool):
    torch.manual_seed(0)
    stage, x = Stage().double(), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    gradient = None if objective else torch.randn(3, 4, dtype=torch.float64)
    stage.norm.weight.grad = torch.ones(4, dtype=torch.float64)

    def output() -> torch.Tensor:
        return stage(x).square().sum() if objective else stage(x)

    split = BackwardSplit(output(), x, stage.named_parameters())
    input_gradient = split.compute_input_gradient(gradient)
    assert stage.first.weight.grad is None
    assert x.grad is None
    split.add_weight_gradients()
    found = [input_gradient, *(weight.grad for weight in stage.parameters())]
    stage.zero_grad()
    stage.norm.weight.grad = torch.ones(4, dtype=torch.float64)
    output().backward(gradient)
    expected = [x.grad, *(weight.grad for weight in stage.parameters())]
    assert all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))  # type: ignore[arg-type]


def test_a_weight_in_two_places_is_noticed():
    linear, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    with pytest.raises(AssertionError, match="too often"):
        BackwardSplit(linear(linear(x)).sum(), x, linear.named_parameters())


class Repeated(nn.Module):
    """A table that several operators on the path read through others, as modules of multi-token prediction do."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4), nn.Linear(4, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(3))
        self.joins = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        depths = [x]
        rows = self.table(torch.arange(9) % 5).chunk(3)
        for row, norm, join in zip(rows, self.norms, self.joins, strict=True):
            depths.append(join(torch.cat((norm(row), depths[-1]), dim=-1)))
        return torch.cat([depth @ self.head.weight for depth in depths]).sin()


def test_a_table_that_is_read_along_the_path_is_counted_once():
    torch.manual_seed(0)
    stage, x = Repeated().double(), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(12, 4, dtype=torch.float64)
    split = BackwardSplit(stage(x), x, stage.named_parameters())
    split.compute_input_gradient(gradient)
    split.add_weight_gradients()
    found = {name: weight.grad for name, weight in stage.named_parameters()}
    stage.zero_grad()
    stage(x).backward(gradient)
    for name, weight in stage.named_parameters():
        if weight.grad is None:
            assert found[name] is None
        else:
            torch.testing.assert_close(found[name], weight.grad, msg=name)


def test_a_weight_of_a_compiled_graph_that_is_used_elsewhere_counts_once():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.ones(4))
            self.compiled = torch.compile(self.linear, backend="aot_eager")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.scale * x + self.compiled(x) + self.linear.weight.exp().sum(0))

    stage, x = Shared(), torch.randn(3, 4, requires_grad=True)
    split = BackwardSplit(stage(x).square().sum(), x, stage.named_parameters())
    split.compute_input_gradient(None)
    assert split.added_early
    assert stage.last.weight.grad is None
    split.add_weight_gradients()
    found = [weight.grad for weight in stage.parameters()]
    stage.zero_grad()
    stage(x).square().sum().backward()
    for weight, gradient in zip(stage.parameters(), found, strict=True):
        torch.testing.assert_close(gradient, weight.grad)


def test_a_head_above_compiled_graphs_does_not_keep_them_for_the_second_part():
    compiled: Any = torch.compile(nn.Linear(4, 4), backend="aot_eager")
    head = nn.Linear(4, 4)
    stage, x = nn.Sequential(compiled, head), torch.randn(3, 4, requires_grad=True)
    split = BackwardSplit(stage(x).square().sum(), x, stage.named_parameters())
    split.compute_input_gradient(None)
    found = [weight.grad for weight in stage.parameters()]
    split.add_weight_gradients()
    stage.zero_grad()
    stage(x).square().sum().backward()
    for weight, gradient in zip(stage.parameters(), found, strict=True):
        torch.testing.assert_close(gradient, weight.grad)


class Kept:
    """A tensor kept for backward."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@pytest.mark.skipif(not NODES_LIVE_ALONE, reason="older versions of torch keep the graph for the second part")
def test_each_part_frees_what_no_later_one_needs():
    stage, x, kept = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(3, 4, requires_grad=True), WeakSet()

    def keep(tensor: torch.Tensor) -> Any:
        box = Kept(tensor)
        kept.add(box)
        return box

    def forward(_: object, microbatch: int, hidden: torch.Tensor | None) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda box: box.tensor):
            return stage(hidden).square().sin().sum()

    runtime = pipeline_stage.Stage(1, True, stage)
    runtime.forward(0, x.detach(), forward)
    of_layers = 4  # inputs and weights
    assert len(kept) == of_layers + 2
    result = runtime.backward_input(0, None)
    assert result is not None
    assert len(kept) == of_layers, "the loss is differentiated"
    memory = StorageWeakRef(result.untyped_storage())
    del result
    assert memory.expired(), "the stage before holds its gradient"
    runtime.backward_weights(0)
    assert not kept
