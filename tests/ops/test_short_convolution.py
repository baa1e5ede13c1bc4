"""The short convolution against torch's, document by document; inputs before the sequence, one token at a time."""

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ranks import run_ranks
from titan_exp.ops.linear_attention import ShortConvolutionCore, short_convolution, short_convolution_step

BATCH, SEQ, CHANNELS, TAPS = 2, 23, 6, 4
EXACT: dict[str, Any] = {"rtol": 1e-13, "atol": 1e-13}
CUTS = ([0, 1, 3, 11, SEQ], [0, 9, SEQ])
"""Documents of each row."""


def operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, weight and inputs before."""
    random = torch.Generator().manual_seed(0)
    shapes = ((BATCH, SEQ, CHANNELS), (CHANNELS, TAPS), (BATCH, TAPS - 1, CHANNELS))
    x, weight, before = (torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes)
    return x.requires_grad_(), weight.requires_grad_(), before.requires_grad_()


def documents() -> Tensor:
    """The number of a row's first document comes again after the second."""
    rows = [
        torch.cat(
            [torch.full((end - start,), number % 2) for number, (start, end) in enumerate(itertools.pairwise(cuts))]
        )
        for cuts in CUTS
    ]
    return torch.stack(rows)


def published(x: Tensor, weight: Tensor) -> Tensor:
    """Of one document [tokens, channels], zeros before it."""
    out = F.conv1d(x.T[None], weight[:, None], padding=TAPS - 1, groups=CHANNELS)[0, :, : len(x)].T
    return F.silu(out)


def assert_same(found: Tensor, expected: Tensor, *leaves: Tensor) -> None:
    torch.testing.assert_close(found, expected, **EXACT)
    gradient = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=found.dtype)
    for mine, theirs in zip(
        torch.autograd.grad(found, leaves, gradient), torch.autograd.grad(expected, leaves, gradient), strict=True
    ):
        torch.testing.assert_close(mine, theirs, **EXACT)


def test_it_is_torch_s_in_each_document():
    x, weight, _ = operands()
    assert_same(
        ShortConvolutionCore()(x, weight, None),
        torch.stack([published(row, weight) for row in x]),
        x,
        weight,
    )
    rows = [
        torch.cat([published(row[start:end], weight) for start, end in itertools.pairwise(cuts)])
        for row, cuts in zip(x, CUTS, strict=True)
    ]
    assert_same(short_convolution(x, weight, documents()), torch.stack(rows), x, weight)


def test_the_inputs_before_belong_to_their_documents():
    x, weight, before = operands()
    joined = torch.cat((before, x), dim=1)
    expected = torch.stack([published(row, weight) for row in joined])[:, TAPS - 1 :]
    assert_same(short_convolution(x, weight, None, before), expected, x, weight, before)
    ids = documents()
    # The first row goes on with its last input alone, the second row starts.
    known = torch.tensor([[0, 1, 0], [1, 1, 1]])
    first = published(torch.cat((before[0, 2:], x[0, :1])), weight)[1:]
    alone = short_convolution(x, weight, ids)
    expected = torch.stack((torch.cat((first, alone[0, 1:])), alone[1]))
    assert_same(short_convolution(x, weight, ids, before, known), expected, x, weight, before)


def test_a_single_tap_scales_its_token():
    x, weight, _ = operands()
    single = weight[:, -1:]
    assert_same(short_convolution(x, single, documents()), F.silu(x * weight[:, -1]), x, weight)


def test_one_token_at_a_time_is_the_convolution():
    x, weight, before = (tensor.detach() for tensor in operands())
    window, outs = before, []
    for t in range(SEQ):
        out, window = short_convolution_step(x[:, t], weight, window)
        outs.append(out)
    torch.testing.assert_close(torch.stack(outs, 1), short_convolution(x, weight, None, before), **EXACT)


def test_bf16_is_rounded_once():
    x, weight, _ = (tensor.detach().bfloat16() for tensor in operands())
    exact = short_convolution(x.double(), weight.double(), documents())
    assert torch.equal(short_convolution(x, weight, documents()), exact.bfloat16())


def test_backward_keeps_the_input_alone():
    x, weight, before = operands()
    saved = list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        short_convolution(x, weight, documents(), before)
    known = {tensor.data_ptr() for tensor in (x, weight, before)}
    assert {tensor.data_ptr() for tensor in saved if tensor.is_floating_point()} == known


def compiled() -> list[list[Tensor]]:
    found = []
    call = torch.compile(short_convolution, backend="aot_eager", fullgraph=True)
    for function in (call, short_convolution):
        x, weight, before = operands()
        out = function(x, weight, documents(), before, documents()[:, : TAPS - 1])
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), (x, weight, before))])
    return found


def test_it_is_compiled_as_one_graph():
    # In a process where shapes are not checked: the compiler cannot look through what does.
    [(mine, expected)] = run_ranks(1, compiled)
    for it, other in zip(mine, expected, strict=True):
        torch.testing.assert_close(it, other, **EXACT)
