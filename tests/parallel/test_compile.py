"""Compiled blocks: inductor's settings by device and configuration, and its kernels against eager ones."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from tests.models.shapes import real_model
from tests.patching import patch
from tests.ranks import run_ranks
from titan_exp.config.groups.parallelism import CompileConfig
from titan_exp.data.batch import Batch
from titan_exp.parallel.activation_checkpoint import compile_blocks, inductor_options
from titan_exp.trainer.distributed import joined_process_group
from titan_exp.trainer.objective import LanguageModeling


def mesh(device: str, ranks: int = 1) -> Any:
    return SimpleNamespace(device=torch.device(device), world=SimpleNamespace(size=lambda: ranks))


CUDA, TWO, CPU = mesh("cuda"), mesh("cuda", 2), mesh("cpu")


@pytest.mark.parametrize(
    ("of", "deterministic", "changed", "tuned"),
    [
        (CUDA, False, {}, True),
        (CUDA, True, {}, False),
        (CUDA, False, {"autotune_gemms": "never"}, False),
        (TWO, False, {}, False),
        (TWO, False, {"autotune_gemms": "always"}, True),
        (TWO, True, {"autotune_gemms": "always"}, False),
        (CUDA, False, {"backend": "aot_eager"}, False),
        (CPU, False, {}, False),
    ],
)
def test_matmuls_are_autotuned_on_cuda_unless_deterministic(
    of: Any, deterministic: bool, changed: dict[str, Any], tuned: bool
):
    config = CompileConfig(**{"enabled": True, "components": ["blocks"], "backend": "inductor", **changed})
    options = inductor_options(config, of, deterministic=deterministic)
    assert options.get("max_autotune_gemm", False) is tuned
    # Names that inductor does not know are refused by torch.compile.
    assert all(hasattr(inductor, name) for name in options)
    assert (options.get("deterministic", False) is True) is deterministic
    # Else SwiGLU's output is recomputed by a kernel of its own, beside that of its gradients.
    on_cuda = of is not CPU and config.backend == "inductor"
    assert (options.get("max_pointwise_cat_inputs") == 0) is on_cuda


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


# Inductor imports parts of torch that warn of their deprecation.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_options_reach_inductor():
    model = nn.Module()
    model.blocks = nn.ModuleDict({"0": Block()})
    config = CompileConfig(enabled=True, components=["blocks"], backend="inductor")
    compile_blocks(model, "inductor", inductor_options(config, CUDA, deterministic=False))
    seen: list[tuple[bool, str]] = []

    def look(_: Any) -> None:
        seen.append((inductor.max_autotune_gemm, inductor.max_autotune_gemm_backends))

    torch._dynamo.reset()
    # A single matmul is a call of torch's library: nothing is compiled by a C++ compiler.
    with inductor.patch(post_grad_custom_post_pass=look, fx_graph_cache=False):
        model.blocks["0"](torch.ones(4, 8)).sum().backward()
    torch._dynamo.reset()
    assert seen == [(True, "ATEN,TRITON")] * 2
    assert inductor.max_autotune_gemm is False


class Heads(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.linear = nn.Linear(8, 4 * heads)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).unflatten(-1, (self.heads, 4)).sum(-2)


def graphs_of_blocks(recomputed: bool) -> list[bool]:
    """True for each compiled graph with a symbol, in sharded blocks of nine shapes, of which two are equal."""
    model, symbolic = nn.Module(), []
    model.blocks = nn.ModuleDict({str(layer): Heads(heads) for layer, heads in enumerate([*range(1, 10), 2])})
    if recomputed:
        for block in model.blocks.values():
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)

    def backend(graph: Any, inputs: list[Any]) -> Any:
        symbolic.append(any(isinstance(number, torch.SymInt) for number in inputs))
        return graph.forward

    torch._dynamo.reset()
    compile_blocks(model, backend)  # type: ignore[arg-type]  # a name or a function
    with joined_process_group(torch.device("cpu")):
        ranks = init_device_mesh("cpu", (2,))
        for block in model.blocks.values():
            fully_shard(block, mesh=ranks)
            block(torch.ones(3, 8)).sum().backward()
    torch._dynamo.reset()
    return symbolic


@pytest.mark.parametrize("recomputed", [False, True])
def test_blocks_of_many_shapes_have_a_graph_each(recomputed: bool):
    assert run_ranks(2, graphs_of_blocks, recomputed) == [[False] * 9] * 2


def gradients(device: str, *, compiled: bool) -> dict[str, Tensor]:
    """Loss, in chunks, of a model of one block, and the gradient of each parameter."""
    model, objective = real_model(layers=1).to(device), LanguageModeling(chunk_tokens=31, z_loss=1e-3)
    if compiled:
        compile_blocks(model, "inductor")
        objective = objective.compiled("inductor")
    tokens = torch.arange(2 * 31, device=device).reshape(2, 31) * 7 % 97
    labels = torch.where(tokens % 5 == 0, -100, tokens.flip(1))
    loss = objective(model, Batch(tokens, labels, None, None)).total
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {name: value.detach().cpu() for name, value in {"loss": loss, **found}.items()}


def eager_and_compiled(device: str, mutate: Callable[[], None] | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    eager = gradients(device, compiled=False)
    if mutate is not None:
        mutate()
    return eager, gradients(device, compiled=True)


def a_rotation_is_not_turned_back() -> None:
    def make(original: Any) -> Any:
        return lambda heads, cos, sin: original(heads, cos, sin.abs())

    patch("titan_exp.ops.attention.rope.rotate", make)


def gates_are_taken_for_ups() -> None:
    patch(
        "titan_exp.ops.swiglu.halves",
        lambda original: lambda gate_up, group: tuple(reversed(original(gate_up, group))),
    )


def onehot_is_one_column_off() -> None:
    patch(
        "titan_exp.ops.cross_entropy.locate",
        lambda original: lambda labels, *rest: (original(labels, *rest)[0] + 1, original(labels, *rest)[1]),
    )


ON_CUDA = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize(
    ("device", "mutate"),
    [
        pytest.param("cpu", None, marks=pytest.mark.night),  # a C++ compiler takes half a minute
        pytest.param("cuda", None, marks=ON_CUDA),
        *(
            pytest.param("cpu", mutate, marks=pytest.mark.night)
            for mutate in (a_rotation_is_not_turned_back, gates_are_taken_for_ups, onehot_is_one_column_off)
        ),
    ],
)
def test_compiled_kernels_have_the_gradients_of_eager_ones(device: str, mutate: Callable[[], None] | None):
    """Of each parameter in fp32: norms, SwiGLU, RoPE and the loss, whose compiled backward is not the eager one."""
    ((eager, compiled),) = run_ranks(1, eager_and_compiled, device, mutate)
    errors = {name: float((compiled[name] - value).norm() / value.norm()) for name, value in eager.items()}
    assert len(errors) == 1 + 2 + 2 + 4 + 1
    assert (max(errors.values()) < 1e-5) == (mutate is None), errors
