"""Activation checkpointing: bytes kept for backward, and recomputed operators."""

import gc
from collections import Counter
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.models.shapes import real_model
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.activation_checkpoint import ActivationCheckpointConfig
from titan_exp.parallel.activation_checkpoint import apply_activation_checkpointing
from titan_exp.parallel.compile import compile_blocks

MM = torch.ops.aten.mm.default
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
KEEPING = ["aten.mm/2", "aten._scaled_dot_product_flash_attention_for_cpu"]
LAYERS = 4


def config(mode: Any, *save: str, every: int = 2, budget: float = 0.5) -> ActivationCheckpointConfig:
    return ActivationCheckpointConfig(mode, every, list(save), budget)


def model() -> nn.Module:
    found = real_model(layers=LAYERS)
    for block in found.blocks.values():  # type: ignore[union-attr]  # the decoder's own
        block.attention.core.backend = "flash"  # type: ignore[union-attr]
    return found


TOKENS = torch.arange(128).reshape(2, 64) % 97


class Watch(TorchDispatchMode):
    """Counts calls of operators, and knows which of their outputs are still in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls[func] += 1
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._made[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def kept(self) -> int:
        """Bytes made under watch and still held."""
        gc.collect()
        return sum(size for storage, size in self._made.values() if not storage.expired())


class Cost:
    """A forward and backward pass: bytes kept between them, operators called in each, the gradients."""

    def __init__(self, checkpointing: ActivationCheckpointConfig) -> None:
        found = model()
        apply_activation_checkpointing(found, checkpointing)
        with Watch() as watch:
            logits = found(TOKENS)
            self.kept, self.forward = watch.kept(), watch.calls.copy()
            watch.calls.clear()
            logits.square().mean().backward()
            self.backward = watch.calls
        self.gradients = {name: parameter.grad for name, parameter in found.named_parameters()}


@pytest.fixture(scope="module")
def nothing() -> Cost:
    return Cost(config("none"))


def test_what_is_kept_falls_in_the_order_of_the_modes(nothing: Cost):
    every_third, every_second = Cost(config("every_n", every=3)), Cost(config("every_n", every=2))
    full = Cost(config("full"))
    assert full.kept < every_second.kept < every_third.kept < nothing.kept
    assert full.kept < Cost(config("selective", *KEEPING)).kept < Cost(config("selective", "aten.mm")).kept
    assert Cost(config("selective", "aten.mm", *KEEPING[1:])).kept < nothing.kept
    assert full.kept < nothing.kept / 3


@pytest.mark.parametrize(
    ("checkpointing", "matmuls", "attentions"),
    [
        # Of a block's four matmuls the last has nothing after it that backward needs, and is never called again.
        (config("full"), 3 * LAYERS, LAYERS),
        (config("every_n", every=2), 3 * 2, 2),
        (config("every_n", every=3), 3, 1),
        (config("every_n", every=1), 3 * LAYERS, LAYERS),
        (config("selective", "aten.mm"), 0, LAYERS),
        (config("selective", "aten.mm.default"), 0, LAYERS),
        (config("selective", "aten.mm/2"), LAYERS, LAYERS),
        (config("selective", "aten.mm/3"), 2 * LAYERS, LAYERS),
        (config("selective", *KEEPING), LAYERS, 0),
        (config("selective", "aten.cos"), 3 * LAYERS, LAYERS),
    ],
)
def test_what_is_computed_again(nothing: Cost, checkpointing, matmuls: int, attentions: int):
    found = Cost(checkpointing)
    assert found.backward[MM] - nothing.backward[MM] == matmuls
    assert found.backward[ATTENTION] - nothing.backward[ATTENTION] == attentions
    assert found.forward[MM] == nothing.forward[MM]
    for name, gradient in nothing.gradients.items():
        again = found.gradients[name]
        assert gradient is not None
        assert again is not None
        assert torch.equal(again, gradient), name


class Layer(nn.Module):
    """A block to compile: shapes are not checked inside, which no compiler could follow."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x.sin())
        return x + self.down(hidden.cos() * hidden.tanh()).cos()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(index): Layer() for index in range(LAYERS)})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


def saved_when_compiled(checkpointing: ActivationCheckpointConfig) -> int:
    """Bytes that compiled blocks save for backward."""
    torch._dynamo.reset()
    with functorch_config.patch(activation_memory_budget=1.0):
        found = Stack()
        apply_activation_checkpointing(found, checkpointing)
        compile_blocks(found, "aot_eager")
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = found(torch.ones(128, 64)).sum()
        loss.backward()
    return sum(saved.values())


# Dynamo looks at `.grad` of a block's input and catches torch's warning about it; here warnings are errors.
looking_at_grad = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@looking_at_grad
def test_the_compiler_keeps_to_the_budget():
    whole = saved_when_compiled(config("none"))
    assert saved_when_compiled(config("budget", budget=1.0)) == whole
    half, none = (saved_when_compiled(config("budget", budget=share)) for share in (0.5, 0.0))
    assert none < half < whole


@looking_at_grad
def test_the_compiler_keeps_the_chosen_operators():
    keeping, whole = saved_when_compiled(config("selective", "aten.mm")), saved_when_compiled(config("none"))
    assert saved_when_compiled(config("selective", "aten.cos")) < keeping < whole


@pytest.mark.parametrize(
    ("entry", "remedy"),
    [
        ("aten.mm.defualt", "aten.mm.default"),
        ("aten._scaled_dot_product_flash_atention", "aten._scaled_dot_product_flash_attention"),
        ("nowhere.ring_attention", "torch.ops"),
        ("mm", ""),
    ],
)
def test_an_operator_that_does_not_exist_is_refused(entry: str, remedy: str):
    with pytest.raises(UserError) as caught:
        apply_activation_checkpointing(model(), config("selective", entry))
    assert caught.value.violations[0].value == entry
    assert remedy in caught.value.violations[0].remedy
