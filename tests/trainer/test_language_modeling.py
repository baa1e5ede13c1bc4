import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.models.shapes import real_model
from tests.ranks import run_ranks
from titan_exp.data.batch import Batch
from titan_exp.ops.cross_entropy import IGNORE_INDEX, linear_loss_sum
from titan_exp.trainer.objective import LanguageModeling

VOCAB, SEQ = 4001, 64


def batch() -> Batch:
    tokens = torch.arange(2 * SEQ).reshape(2, SEQ)
    return Batch(tokens=tokens, labels=tokens + 1, positions=None, documents=None)


class Largest(TorchDispatchMode):
    """The most elements that any tensor had."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


def trained(objective: LanguageModeling, tied: bool) -> tuple[float, int, dict[str, Tensor]]:
    model = real_model(vocab_size=VOCAB, tied_embeddings=tied)
    with Largest() as largest:
        loss = objective(model, batch())
        (loss.total / 128).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    return float(loss.metrics["loss"]), largest.elements, gradients


def test_the_model_never_holds_all_logits():
    for tied in (False, True):
        whole_loss, whole_largest, whole = trained(LanguageModeling(z_loss=0.01), tied)
        loss, largest, chunked = trained(LanguageModeling(chunk_tokens=16, z_loss=0.01), tied)
        assert whole_largest == 2 * SEQ * VOCAB
        assert largest == VOCAB * 64  # the embedding's gradient
        assert abs(loss / whole_loss - 1) < 1e-6
        for name, gradient in whole.items():
            torch.testing.assert_close(chunked[name], gradient, atol=1e-6, rtol=1e-4)


def test_evaluation_holds_nothing_larger_than_the_head():
    model = real_model(vocab_size=VOCAB).eval()
    with torch.no_grad(), Largest() as largest:
        LanguageModeling(chunk_tokens=16)(model, batch())
    assert largest.elements == max(16 * VOCAB, VOCAB * 64)


def graphs(compute: Callable[[], Any]) -> tuple[Any, int]:
    """What a function returns, and how many graphs were compiled for it."""
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    result = compute()
    return result, counters["unique_graphs"] - before


def trained_on(loss: LanguageModeling, hidden: Tensor, weight: Tensor, labels: Tensor) -> list[Tensor]:
    """Objective, cross-entropy and gradients."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    if loss.chunk_tokens is None:
        found = loss.loss_sum(hidden @ weight.T, labels, loss.z_loss)
    else:
        options: dict[str, Any] = {
            "chunk_tokens": loss.chunk_tokens,
            "z_loss": loss.z_loss,
            "functions": loss.chunk_functions,
        }
        found = linear_loss_sum(hidden, weight, labels, **options)
    (found.objective * 0.1).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [found.objective.detach(), found.cross_entropy, hidden.grad, weight.grad]


def compare_compiled(chunk_tokens: int | None, z_loss: float, dtype: torch.dtype) -> list[int]:
    """Graphs compiled for each of two batches of 40 tokens, whose losses are found equal to the uncompiled ones."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    plain = LanguageModeling(chunk_tokens, z_loss)
    compiled, compilations = plain.compiled("aot_eager"), []
    for _ in range(2):
        hidden, weight = torch.randn(2, 20, 8, generator=generator), torch.randn(53, 8, generator=generator)
        labels = torch.randint(0, 53, (2, 20), generator=generator)
        labels[0, 3:7] = IGNORE_INDEX
        inputs = hidden.to(dtype), weight.to(dtype), labels
        found, count = graphs(partial(trained_on, compiled, *inputs))
        torch.testing.assert_close(found, trained_on(plain, *inputs))
        compilations.append(count)
    return compilations


CASES = list(itertools.product((None, 20, 16, 40), (0.0, 0.01), (torch.float32, torch.bfloat16)))


def compare_all() -> list[list[int]]:
    return [compare_compiled(*case) for case in CASES]


@pytest.mark.night
def test_compiled_it_is_the_same_and_compiled_once_for_each_shape_of_a_chunk():
    """In a process of its own, where shapes are not checked: no compiler could follow the checks."""
    graphs = {None: 1, 20: 2, 16: 4, 40: 2}
    expected = [[graphs[chunk], 0] for chunk, _, _ in CASES]
    assert run_ranks(1, compare_all)[0] == expected
