"""Recomputation and split backward of blocks with experts: tokens are exchanged once, nothing is kept over steps."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.utils as dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.config.composing import experiment
from tests.ranks import run_ranks
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.models.blocks.feed_forward import Router
from titan_exp.models.build import build_model, init_specs
from titan_exp.ops.autograd import local_tensor
from titan_exp.parallel.apply import parallelize
from titan_exp.parallel.fsdp import disable_gradient_sync, reduce_gradients
from titan_exp.parallel.mesh import build_mesh
from titan_exp.parallel.meta_init import init_weights, materialize_parameters
from titan_exp.parallel.pipeline_stage import Stage, keep_compiled_buffers
from titan_exp.trainer.distributed import joined_process_group

CPU = torch.device("cpu")
LAYERS, STEPS = 2, 3
MODEL = [
    "model=qwen3_moe_debug",
    f"model.layers={LAYERS}",
    "model.moe.router_bias=true",
    "model.moe.groups=4",
    "model.moe.active_groups=2",
    "parallelism.dp_shard=2",
    "parallelism.ep=2",
]
COMPILED = "compile=blocks compile.backend=aot_eager"


@dataclass
class Steps:
    """Passes of a model with recomputation."""

    forward: list[int]
    """Messages of rows and counts in each forward pass."""
    backward: list[int]
    """Those in each backward pass."""
    kept: list[int]
    """Received tensors that are still held after each step."""
    gradients: dict[str, Tensor]
    """Sums over steps."""
    counts: list[Tensor]
    """Tokens per expert."""


def steps(*words: str) -> Steps:
    """Train a model for some steps; the word `shift` changes the biases between forward and backward."""
    layout, shift = [word for word in words if word != "shift"], "shift" in words
    with joined_process_group(CPU), messages() as sent:
        model = parallel_model(*layout)
        routers = [module for module in model.modules() if isinstance(module, Router)]
        found = Steps([], [], [], {}, [])
        gc.collect()
        gc.disable()
        for step in range(STEPS):
            tokens = (torch.arange(64).view(2, 32) * (7 + step) + 31 * dist.get_rank()) % 320
            before = len(sent)
            loss = model(tokens).float().square().mean()
            found.forward.append(len(sent) - before)
            if shift:
                for router in routers:
                    router.bias.copy_(torch.arange(8.0).roll(step))
            loss.backward()
            del loss
            found.backward.append(len(sent) - before - found.forward[-1])
            for router in routers:
                router.bias.zero_()
            found.kept.append(sum(not storage.expired() for storage in sent))
        found.gradients = {name: local_tensor(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        found.counts = [router.counts.clone() for router in routers]
        return found


def parallel_model(*layout: str) -> nn.Module:
    """The model of this rank with its initial weights."""
    made = experiment(*MODEL, "compile=none", *layout)
    mesh = build_mesh(made.parallelism, CPU, experts=True)
    with torch.device("meta"):
        model = build_model(made.model, seq_len=32, attention_backend="math")
    specs = init_specs(model)
    assert specs is not None
    parallelize(model, mesh, ResolvedLayout.of(made), made.activation_checkpoint, made.compile)
    materialize_parameters(model, CPU)
    init_weights(model, specs, 0)
    model.reset_buffers()  # type: ignore[operator]  # the decoder's own
    return model


@contextmanager
def messages() -> Iterator[list[StorageWeakRef]]:
    """Received tensors of the token exchange's messages in the `with` block."""
    sent: list[StorageWeakRef] = []
    original = dist.all_to_all_single

    def all_to_all_single(received: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(StorageWeakRef(received.untyped_storage()))
        return original(received, *args, **kwargs)

    dist.all_to_all_single = all_to_all_single
    yield sent
    dist.all_to_all_single = original


@pytest.fixture(scope="module")
def plain() -> list[Steps]:
    return run_ranks(2, steps)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("activation_checkpoint=full", marks=pytest.mark.day),
        *(
            pytest.param(layout, marks=pytest.mark.night)
            for layout in (
                "activation_checkpoint=full compile=blocks compile.backend=eager",
                "activation_checkpoint=every_n activation_checkpoint.every=1",
                "activation_checkpoint=selective activation_checkpoint.save=[auto]",
                "activation_checkpoint=selective activation_checkpoint.save=[aten.mm/2]",
                "activation_checkpoint=none compile=blocks compile.backend=aot_eager",
                f"activation_checkpoint=full {COMPILED}",
                "activation_checkpoint=full compile=blocks compile.backend=inductor",
                f"activation_checkpoint=budget activation_checkpoint.budget=0 {COMPILED}",
                f"activation_checkpoint=budget activation_checkpoint.budget=0.5 {COMPILED}",
                f"activation_checkpoint=selective activation_checkpoint.save=[auto] {COMPILED}",
            )
        ),
    ],
)
def test_recomputation_neither_chooses_nor_exchanges_again(plain: list[Steps], layout: str):
    results = run_ranks(2, steps, *layout.split(), "shift", limit=300)
    for found, expected in zip(results, plain, strict=True):
        assert found.forward == expected.forward == [4 * LAYERS] * STEPS
        assert found.backward == expected.backward == [3 * LAYERS] * STEPS
        assert found.kept == expected.kept == [0] * STEPS
        for name, gradient in expected.gradients.items():
            torch.testing.assert_close(found.gradients[name], gradient, msg=lambda m, n=name: f"{n}: {m}")
        assert all(map(torch.equal, found.counts, expected.counts))


def graphs(*layout: str) -> list[int]:
    """Graphs compiled until the end of each step.

    The tokens of step `STEPS` choose the first experts alone; the last step has half of the tokens.
    """
    with joined_process_group(CPU):
        model = parallel_model(*layout)
        routers = [module for module in model.modules() if isinstance(module, Router)]
        found: list[int] = []
        for step, length in enumerate([32] * (STEPS + 2) + [16]):
            for router in routers:
                router.bias[:] = -100 * torch.arange(8.0) * (step == STEPS)
            tokens = torch.arange(2 * length).view(2, length) * (7 + step) + 31 * dist.get_rank()
            model(tokens % 320).float().sum().backward()
            found.append(dynamo.counters["stats"]["unique_graphs"])
        return found


@pytest.mark.night
@pytest.mark.parametrize("layout", ["parallelism.ep=2", "parallelism.ep=1"])
def test_other_loads_of_experts_compile_nothing_again(layout: str):
    """Not even a load of zero."""
    for found in run_ranks(2, graphs, layout, *COMPILED.split(), limit=300):
        assert found[0] > 0
        assert set(found[1:-1]) == {found[1]}
        assert found[-1] > found[-2]


def halves(*layout: str, split: bool = True) -> tuple[list[int], dict[str, Tensor]]:
    """Messages of forward, of backward and of its second part, and gradients, of two micro-batches of a last stage."""
    keep_compiled_buffers()
    with joined_process_group(CPU), messages() as sent:
        model = parallel_model("parallelism.reshard_after_forward=never", *layout)
        stage = Stage(1, True, model)
        disable_gradient_sync(model, keep_gathered=True)
        hidden: list[Tensor | None] = [None]
        # What the stage before sends takes the place of the embedding.
        model.embedding.register_forward_hook(lambda *_: hidden[0])  # type: ignore[union-attr]  # a module

        def compute(_: Stage, number: int, received: Tensor | None) -> Tensor:
            hidden[0] = received
            return model((torch.arange(64).view(2, 32) * (7 + number)) % 320).float().square().mean()

        counts = [0, 0, 0]
        for number in range(2):
            before = len(sent)
            stage.forward(number, torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(number)), compute)
            after = len(sent)
            (stage.backward_input if split else stage.backward)(number, None)
            last = len(sent)
            if split:
                stage.backward_weights(number)
            for index, count in enumerate((after - before, last - after, len(sent) - last)):
                counts[index] += count
        reduce_gradients(model)
        return counts, {name: local_tensor(p.grad) for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "layout",
    [
        "activation_checkpoint=none",
        *(
            pytest.param(layout, marks=pytest.mark.night)
            for layout in (
                "activation_checkpoint=full",
                f"activation_checkpoint=none {COMPILED}",
                f"activation_checkpoint=full {COMPILED}",
                f"activation_checkpoint=selective activation_checkpoint.save=[auto] {COMPILED}",
                "compile=blocks compile.backend=inductor",
            )
        ),
    ],
)
def test_the_second_part_of_a_backward_pass_sends_nothing(layout: str):
    """Compiled blocks too, which compute all of their gradients at once."""
    results = run_ranks(2, halves, *layout.split(), limit=300)
    for found, expected in zip(results, run_ranks(2, partial(halves, split=False)), strict=True):
        assert found[0] == expected[0] == [2 * 4 * LAYERS, 2 * 3 * LAYERS, 0]
        assert found[1].keys() == expected[1].keys()
        for name, gradient in expected[1].items():
            torch.testing.assert_close(found[1][name], gradient, msg=lambda m, n=name: f"{n}: {m}")
