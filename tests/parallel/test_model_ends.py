"""Embedding, norm and head under FSDP: gathered for their calls only, with the gradients of one device."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.shapes import TINY, real_model
from tests.parallel.test_meta_init import CPU, layout
from tests.patching import patch
from tests.ranks import run_ranks
from titan_exp.models.blocks.transformer import Embedding
from titan_exp.models.build import build_model, init_specs
from titan_exp.ops.cross_entropy import LossSum, linear_loss_sum
from titan_exp.parallel.fsdp import FSDPOptions, apply_fsdp, set_gradient_sync
from titan_exp.parallel.mesh import build_mesh
from titan_exp.parallel.meta_init import init_weights, materialize_parameters
from titan_exp.parallel.tensor_parallel import layers
from titan_exp.parallel.tensor_parallel.layers import TensorParallelGroup
from titan_exp.trainer.distributed import joined_process_group

THREE_BLOCKS = replace(TINY, layers=3)
TOKENS = torch.randint(97, (4, 2, 16), generator=torch.Generator().manual_seed(5))
"""Rows of two micro-batches of two ranks: [rank and micro-batch, batch, seq]."""
ENDS = ["embedding.weight", "norm.weight", "head.weight"]


@pytest.mark.parametrize("by_sequence", [True, False])
def test_an_embedding_returns_no_view(monkeypatch: pytest.MonkeyPatch, by_sequence: bool):
    # FSDP2 warns about a view in each rank's log.
    monkeypatch.setattr(layers, "reduce_scatter", lambda x, degree, _: x[: len(x) // degree].clone())
    region = TensorParallelGroup("", 2, 0, sequence=True, by_sequence=by_sequence)
    for batch in (1, 2):
        found = region.reduce_output(torch.ones(batch, 8, 4, requires_grad=True) + 1)
        assert found.shape == (batch, 4, 4)
        assert found._base is None


def loss_of(model: nn.Module, tokens: Tensor, *, chunked: bool) -> Tensor:
    """Summed loss of the next token, the labels being the same tokens in another order."""
    labels = tokens.flip(1)
    if chunked:
        found = model(tokens, loss=partial(linear_loss_sum, labels=labels, chunk_tokens=7))
        assert isinstance(found, LossSum)
        return found.objective
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")


def sharded(config: Any, degrees: tuple[int, int], **options: Any) -> nn.Module:
    with torch.device("meta"):
        model = build_model(config, seq_len=16, attention_backend="math")
    table = init_specs(model)
    assert table is not None
    apply_fsdp(model, build_mesh(layout(*degrees), CPU), FSDPOptions(bf16=False, **options))
    materialize_parameters(model, CPU)
    init_weights(model, table, seed=3)
    return model


@dataclass(frozen=True)
class Case:
    """A layout and the way that its gradients are computed."""

    degrees: tuple[int, int] = (1, 2)
    tied: bool = False
    chunked: bool = False
    policy: str = "all_but_last"
    twice: bool = False
    """Run both micro-batches forward before a single backward pass."""


def gradients(case: Case, mutate: Callable[[], None] | None = None) -> dict[str, Tensor]:
    """Whole gradients of all tokens."""
    if mutate is not None:
        mutate()
    with joined_process_group(CPU):
        model = sharded(
            replace(THREE_BLOCKS, tied_embeddings=case.tied), case.degrees, reshard_after_forward=case.policy
        )
        own = TOKENS.chunk(dist.get_world_size())[dist.get_rank()]
        if case.twice:
            torch.stack([loss_of(model, tokens, chunked=case.chunked) for tokens in own]).sum().backward()
        else:
            for index, tokens in enumerate(own):
                set_gradient_sync(model, last=index == len(own) - 1)
                loss_of(model, tokens, chunked=case.chunked).backward()
        found = {name: parameter.grad for name, parameter in model.named_parameters()}
        return {name: grad.full_tensor() for name, grad in found.items() if isinstance(grad, DTensor)}


def expected_gradients(tied: bool) -> dict[str, Tensor]:
    model = real_model(seed=3, layers=3, tied_embeddings=tied)
    for tokens in TOKENS:
        loss_of(model, tokens, chunked=False).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    "case",
    [
        Case(chunked=True),
        pytest.param(Case(policy="always", twice=True), marks=pytest.mark.night),
        pytest.param(Case((2, 2)), marks=pytest.mark.night),
        pytest.param(Case((2, 1), chunked=True, twice=True), marks=pytest.mark.night),
        pytest.param(Case(policy="never", twice=True), marks=pytest.mark.night),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_those_of_one_device(case: Case, tied: bool):
    for found in run_ranks(math.prod(case.degrees), gradients, replace(case, tied=tied)):
        assert_same_gradients(found, expected_gradients(tied))


def the_lookup_gets_no_gradient() -> None:
    def make(original: Any) -> Any:
        return lambda self, x, *rest: original(self, x, *rest) if rest else original(self, x).detach()

    patch("titan_exp.models.blocks.transformer.Embedding.forward", make)


def the_head_is_computed_with_a_copy() -> None:
    def make(original: Any) -> Any:
        def forward(self: Embedding, x: Tensor, head: Any = None, loss: Any = None) -> Any:
            return original(self, x) if head is None else head(x, self.weight.detach().clone(), loss)

        return forward

    patch("titan_exp.models.blocks.transformer.Embedding.forward", make)


@pytest.mark.night
@pytest.mark.parametrize("mutate", [the_lookup_gets_no_gradient, the_head_is_computed_with_a_copy])
def test_a_lost_gradient_of_a_tied_weight_is_noticed(mutate):
    found, _ = run_ranks(2, gradients, Case(tied=True), mutate)
    with pytest.raises(AssertionError, match="embedding"):
        assert_same_gradients(found, expected_gradients(tied=True))


def step_trace(tied: bool, options: dict[str, Any]) -> tuple[dict[str, list[str]], list[str], list[str]]:
    """Gathered ends in each block's forward and backward and after an evaluation, and the order of FSDP's events."""
    gathered: dict[str, list[str]] = {}

    def record(model: nn.Module, moment: str) -> None:
        whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
        gathered[moment] = [name for name in whole if name in ENDS]

    with joined_process_group(CPU):
        model = sharded(replace(THREE_BLOCKS, tied_embeddings=tied), (1, 2), **options)
        for number, block in model.get_submodule("blocks").named_children():
            block.register_forward_hook(
                lambda _, inputs, output, n=number: (
                    record(model, f"forward {n}"),
                    inputs[0].requires_grad and inputs[0].register_hook(lambda _: record(model, f"backward {n}")),
                    None,
                )[-1]
            )
        with torch.no_grad():
            model(TOKENS[0])
        record(model, "after evaluation")
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            loss_of(model, TOKENS[0], chunked=False).backward()
        record(model, "after the step")
    events = sorted(profiler.events() or [], key=lambda event: event.time_range.start)
    labels = [event.name for event in events if event.name.startswith("FSDP::")]
    gathers = [label for label in labels if label.startswith("FSDP::all_gather (")]
    passes = ("FSDP::all_gather (", "FSDP::pre_backward (")
    return gathered, gathers, [label.removeprefix("FSDP::") for label in labels if label.startswith(passes)]


def test_ends_are_gathered_only_when_they_are_used():
    gathered, gathers, _ = run_ranks(2, step_trace, False, {})[0]
    assert gathered == {
        **{f"forward {number}": [] for number in range(3)},
        **{f"backward {number}": [] for number in range(3)},
        "after evaluation": [],
        "after the step": [],
    }
    assert len(gathers) == 3 + 2 + 2, "blocks but the last twice; the ends once"


def test_a_tied_weight_is_gathered_once_and_freed_after_the_heads_backward():
    gathered, gathers, _ = run_ranks(2, step_trace, True, {})[0]
    of_root = ["norm.weight"]
    assert all(gathered[f"forward {number}"] == ["embedding.weight", *of_root] for number in range(3))
    assert all(gathered[f"backward {number}"] == of_root for number in range(3))
    assert gathered["after evaluation"] == of_root
    assert gathered["after the step"] == []
    assert gathers.count("FSDP::all_gather (embedding)") == 1


@pytest.mark.parametrize(
    ("tied", "head"), [(False, "norm, head"), pytest.param(True, "embedding", marks=pytest.mark.night)]
)
def test_the_block_before_is_gathered_before_a_blocks_backward_computes(tied: bool, head: str):
    _, _, events = run_ranks(2, step_trace, tied, {"reshard_after_forward": "always"})[0]
    backward = events[events.index(f"pre_backward ({head})") :]
    assert backward == [
        f"pre_backward ({head})",
        "all_gather (blocks.2)",
        "pre_backward (blocks.2)",
        "all_gather (blocks.1)",
        "pre_backward (blocks.1)",
        "all_gather (blocks.0)",
        "pre_backward (blocks.0)",
        "pre_backward (embedding)",
    ]


def divisions(degrees: tuple[int, int]) -> list[str]:
    """Divisions in the backward pass, where FSDP reduces gradients."""
    found: list[str] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # Reduced gradients are flat; norms divide too.
            if "div" in func.__name__ and args[0].dim() == 1:
                found.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with joined_process_group(CPU):
        model = sharded(THREE_BLOCKS, degrees)
        loss = loss_of(model, TOKENS[dist.get_rank()], chunked=False)
        with Record():
            loss.backward()
    return found


@pytest.mark.night
@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)])
def test_gradients_are_not_divided_by_one(degrees: tuple[int, int]):
    assert run_ranks(2, divisions, degrees)[0] == []
