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
from titan_exp.config.groups.parallelism import ActivationCheckpointConfig, AutomaticSave
from titan_exp.parallel.activation_checkpoint import apply_activation_checkpointing, compile_blocks, saved_calls
from titan_exp.parallel.saved_calls import SavedCalls, TracedCall

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
    # A block that keeps its input alone frees, per token: query, key and value, attention's output with a logarithm per
    # head, the residual stream between, gate and up, and a factor of two norms. Norms and SwiGLU are not kept in any
    # mode.
    freed = (nothing.kept - full.kept) / LAYERS
    heads, keys, ffn = 64, 2 * 32, 160
    assert freed == TOKENS.numel() * 4 * (heads + keys + heads + 4 + 64 + 2 * ffn + 2)
    assert (nothing.kept - every_second.kept, nothing.kept - every_third.kept) == (2 * freed, freed)


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

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, width, bias=False), nn.Linear(width, 64, bias=False)

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
    # Elementwise results are recomputed in any mode, so that the matmuls are all that is left to keep.
    assert saved_when_compiled(config("selective", "aten.cos")) < keeping == whole


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


QKV, OUT, GATE_UP = 65536, 32768, 98304
"""Bytes of a block's matmuls that backward reads, whose ratio of bytes to FLOPs is equal."""


@pytest.mark.parametrize(
    ("entry", "budget", "recomputed"),
    [
        ("auto", 0.0, 3 * LAYERS),
        ("auto", OUT / (QKV + OUT + GATE_UP), 2 * LAYERS),
        ("auto", 0.5, LAYERS),
        ("auto", 1.0, 0),
        # Blocks 1 and 3 keep gate and up too.
        ("auto/2", 0.8, LAYERS - 2),
        ("auto/3", 0.8, LAYERS - 1),
        # The budget of three blocks has no room for one more.
        ("auto/3", 0.5 + 1e-3, LAYERS),
    ],
)
def test_the_automatic_list_keeps_to_its_budget(nothing: Cost, entry: str, budget: float, recomputed: int):
    found = Cost(config("selective", entry, budget=budget))
    assert found.backward[MM] - nothing.backward[MM] == recomputed
    assert found.backward[ATTENTION] == nothing.backward[ATTENTION]
    assert found.forward[MM] == nothing.forward[MM]
    for name, gradient in nothing.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name  # type: ignore[arg-type]  # all have gradients


def test_the_automatic_list_keeps_what_it_says():
    none, half = Cost(config("selective", "auto", budget=0.0)), Cost(config("selective", "auto", budget=0.5))
    assert half.kept - none.kept == pytest.approx(LAYERS * (QKV + OUT), abs=1024)


def test_calls_are_ranked_by_bytes_per_flop_and_unread_ones_cost_nothing():
    def call(index: int, size: int, flops: int, **flags: bool) -> TracedCall:
        name, flags = ("aten.mm.default", index), {"always": False, "reached": True, "read": True, **flags}
        return TracedCall(name, f"m{index}", size, flops, **flags)

    traced = (
        call(0, 100, 100),
        call(1, 100, 400),
        call(2, 100, 200),
        call(3, 1000, 100, read=False),
        call(4, 50, 0, always=True),
        call(5, 50, 900, reached=False, read=False),
    )
    eager, compiled = (SavedCalls(traced, AutomaticSave(1), 0.7, compiled) for compiled in (False, True))
    assert [saved.module for saved in eager.matmuls] == [saved.module for saved in compiled.matmuls] == ["m1", "m2"]
    # Without a compiler, the unread matmul is repeated all the same.
    assert (eager.recomputed, compiled.recomputed) == (pytest.approx(200 / 1700), pytest.approx(100 / 1700))
    assert eager.bytes == 250
    assert eager.of_block(0) == ("aten.mm.default#4", "aten.mm.default#1", "aten.mm.default#2")


@looking_at_grad
def test_compiled_blocks_keep_the_automatic_list():
    saved = [
        saved_when_compiled(config("selective", entry, budget=budget))
        for entry, budget in (("auto", 0.0), ("auto/2", 0.65), ("auto", 1.0))
    ]
    up, down = 128 * 256 * 4, 128 * 64 * 4
    assert saved[1] - saved[0] == LAYERS * down + LAYERS // 2 * up
    assert saved[1] < saved[2] <= saved[0] + LAYERS * (down + up)


@looking_at_grad
def test_compiled_blocks_of_two_kinds_keep_their_own_lists():
    """Wide blocks save their second matmul first, narrow ones their first: one graph each."""
    torch._dynamo.reset()
    found = Stack()
    found.blocks["1"] = Layer(width=16)
    apply_activation_checkpointing(found, config("selective", "auto", budget=1.0))
    compile_blocks(found, "aot_eager")
    found(torch.ones(128, 64)).sum().backward()
    wide, narrow = saved_calls(found)
    assert wide.of_block(0) == ("aten.mm.default#1", "aten.mm.default#0")
    assert narrow.of_block(1) == ("aten.mm.default#0", "aten.mm.default#1")


def test_tracing_a_block_leaves_it_as_it_was():
    found = model()
    attention = found.blocks["0"].attention  # type: ignore[index]  # the decoder's own
    plain, forward = {name: value.clone() for name, value in found.state_dict().items()}, type(attention).forward

    def counting(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return forward(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(attention), "forward", counting)
        apply_activation_checkpointing(found, config("selective", "auto/3"))
        found(TOKENS)
    assert attention.calls == 1
    assert all(torch.equal(value, plain[name]) for name, value in found.state_dict().items())
    # Blocks of one shape are traced once.
    (chosen,) = saved_calls(found)
    assert "attention.core" in str(chosen)
    assert len({id(block.saved_calls) for block in found.blocks.values()}) == 1  # type: ignore[union-attr]


class Unknowable(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.nonzero().shape[0]


def test_a_block_that_cannot_be_traced_is_refused():
    found = Stack()
    found.blocks["0"] = Unknowable()
    apply_activation_checkpointing(found, config("selective", "auto"))
    with pytest.raises(UserError) as caught:
        found(torch.ones(2, 64))
    assert "Unknowable" in caught.value.violations[0].reason
    assert "aten.mm/2" in caught.value.violations[0].remedy
