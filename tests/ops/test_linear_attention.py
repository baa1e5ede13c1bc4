"""The gated delta rule against a loop over tokens in fp64 and against transformers; documents, segments, decays."""

import itertools
import sys
from functools import cache
from types import ModuleType
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.ranks import run_ranks
from titan_exp.config.errors.user_error import UserError
from titan_exp.ops import linear_attention as module
from titan_exp.ops.linear_attention import (
    GatedDeltaCore,
    LinearAttentionBackend,
    choose_linear_attention_backend,
    gated_delta,
    gated_delta_step,
    l2_normalized,
    linear_attention,
    linear_attention_backward,
    transition,
)

BATCH, SEQ, KEY_HEADS, HEADS, K, V = 2, 83, 2, 4, 12, 9
KINDS = ("head", "channel")
"""Number of decays: of Gated DeltaNet and of Kimi Delta Attention."""
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def operands(kind: str, *, seq: int = SEQ, dtype: torch.dtype = torch.float64, decay: float = 0.3) -> list[Tensor]:
    """Queries, keys, values, log decays, strengths up to 2, and a state."""
    random = torch.Generator().manual_seed(0)
    heads = (BATCH, seq, HEADS)
    q, k = (torch.randn(BATCH, seq, KEY_HEADS, K, generator=random, dtype=torch.float64) for _ in range(2))
    v = torch.randn(*heads, V, generator=random, dtype=torch.float64)
    g = -decay * torch.rand(*heads, *((K,) if kind == "channel" else ()), generator=random, dtype=torch.float64)
    beta = 2 * torch.rand(*heads, generator=random, dtype=torch.float64)
    state = torch.randn(BATCH, HEADS, K, V, generator=random, dtype=torch.float64)
    given = [l2_normalized(q) * K**-0.5, l2_normalized(k + 1), v, g, beta, state]
    return [x.to(dtype) for x in given]


def packed(seq: int = SEQ) -> Tensor:
    """Documents cut on and off the grid of chunks, one of a single token, and a number that comes again."""
    places = torch.arange(seq)
    return torch.stack([(places >= 11).long() + (places >= 64), 3 * ((places >= 40) & (places < 41)).long()])


def loop(  # noqa: PLR0917  # as `gated_delta`
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents: Any, *, state: Tensor, carry: Any = None
) -> tuple[Tensor, Tensor]:
    """The rule as it is defined, token by token."""
    q, k = (x.repeat_interleave(v.shape[2] // k.shape[2], 2) for x in (q, k))
    outs, before = [], carry
    for t in range(v.shape[1]):
        if documents is not None:
            same = torch.ones(len(v), dtype=torch.bool) if before is None else documents[:, t] == before
            state, before = torch.where(same[:, None, None, None], state, 0), documents[:, t]
        decay = g[:, t].exp()
        state = state * (decay[..., None] if g.dim() == 4 else decay[..., None, None])
        change = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + k[:, t, ..., None] * change[..., None, :]
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outs, 1), state


def passes(call: Any, inputs: list[Tensor], *rest: Any) -> list[Tensor]:
    """Results of a call, and the gradients of all inputs for fixed gradients of the results, exact in bf16."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    results = call(leaves, *rest)
    random = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=random).bfloat16().to(x.dtype) for x in results]
    return [*(x.detach() for x in results), *torch.autograd.grad(results, leaves, weights)]


def ours(x: list[Tensor], documents: Any = None, carry: Any = None, **how: Any) -> tuple[Tensor, Tensor]:
    return gated_delta(*x[:5], documents=documents, state=x[5], carry=carry, **how)


def theirs(x: list[Tensor], documents: Any = None, carry: Any = None) -> tuple[Tensor, Tensor]:
    return loop(*x[:5], documents=documents, state=x[5], carry=carry)


def assert_close(found: list[Tensor], expected: list[Tensor], **how: Any) -> None:
    for mine, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), exact.double(), **(how or EXACT))


PACKED: dict[str, tuple[Tensor | None, Tensor | None]] = {
    "one": (None, None),
    "packed": (packed(), None),
    # The first row goes on, the second starts.
    "packed after another": (packed(), torch.tensor([0, -1])),
}
"""Documents, and those before the segment."""


@cache
def expected(kind: str, documents: str) -> list[Tensor]:
    return passes(theirs, operands(kind), *PACKED[documents])


@pytest.mark.parametrize(
    ("documents", "chunk"), [*itertools.product(PACKED, (16, 24, 64, 128)), ("packed after another", 1)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_recurrence(kind: str, documents: str, chunk: int):
    found = passes(lambda x: ours(x, *PACKED[documents], chunk=chunk), operands(kind))
    assert_close(found, expected(kind, documents))


@pytest.mark.parametrize("kind", KINDS)
def test_segments_hand_on_the_state(kind: str):
    cuts, ids = [0, 1, 21, 24, 64, SEQ], packed()

    def in_segments(x: list[Tensor], *, by_maps: bool) -> tuple[Tensor, Tensor]:
        state, carry, outs = x[5], None, []
        for start, end in itertools.pairwise(cuts):
            part, own = [y[:, start:end] for y in x[:5]], ids[:, start:end]
            out, after = gated_delta(*part, documents=own, state=state, carry=carry)
            if by_maps:
                written, kept = transition(*part[1:], documents=own, carry=carry).tensor_split([V], dim=-1)
                after = kept @ state + written
            state, carry = after, own[:, -1]
            outs.append(out)
        return torch.cat(outs, dim=1), state

    expected = passes(lambda x: ours(x, ids), operands(kind))
    for by_maps in (False, True):
        assert_close(passes(lambda x, by=by_maps: in_segments(x, by_maps=by), operands(kind)), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_separate_ones(kind: str):
    inputs, cuts = [x[:1] for x in operands(kind)], [0, 11, 64, SEQ]

    def alone(x: list[Tensor]) -> tuple[Tensor]:
        parts = [[y[:, start:end] for y in x[:5]] for start, end in itertools.pairwise(cuts)]
        return (torch.cat([gated_delta(*part, documents=None)[0] for part in parts], dim=1),)

    found = passes(lambda x: gated_delta(*x[:5], documents=packed()[:1])[:1], inputs[:5])
    assert_close(found, passes(alone, inputs[:5]))


class AsF64(TorchFunctionMode):
    """Computes in fp64 what code casts to fp32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {name: torch.float64 if arg is torch.float32 else arg for name, arg in (kwargs or {}).items()}
        return func(*args, **kwargs)


@pytest.mark.parametrize(
    ("kind", "package", "name"),
    [
        ("head", "qwen3_next", "torch_chunk_gated_delta_rule"),
        ("head", "qwen3_next", "torch_recurrent_gated_delta_rule"),
        ("channel", "kimi_linear", "chunk_kimi_delta_attention"),
        ("channel", "kimi_linear", "recurrent_kimi_delta_attention"),
    ],
)
def test_it_is_the_published_code(kind: str, package: str, name: str):
    published = pytest.importorskip(f"transformers.models.{package}.modeling_{package}")
    # The published code takes as many key heads as value heads, unnormalized, and scales the queries itself.
    random = torch.Generator().manual_seed(2)
    q, k = (torch.randn(BATCH, SEQ, HEADS, K, generator=random, dtype=torch.float64) for _ in range(2))
    inputs = [q, k, *operands(kind)[2:]]
    function = getattr(published, name)

    def call(x: list[Tensor]) -> tuple[Tensor, Tensor]:
        with AsF64():
            return function(*x[:5], initial_state=x[5], output_final_state=True, use_qk_l2norm_in_kernel=True)

    def normalized(x: list[Tensor]) -> tuple[Tensor, Tensor]:
        return ours([l2_normalized(x[0]) * K**-0.5, l2_normalized(x[1]), *x[2:]])

    assert_close(passes(normalized, inputs), passes(call, inputs), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_similar_keys_do_not_cost_digits(kind: str):
    inputs = operands(kind, decay=1e-3)
    inputs[1] = l2_normalized(inputs[1] * 1e-3 + 1)
    inputs[4] = torch.ones_like(inputs[4])
    exact = passes(theirs, inputs)
    found = passes(ours, [x.float() for x in inputs])
    for mine, expected in zip(found, exact, strict=True):
        assert (mine - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("mean", [-10.0, -1e4])
@pytest.mark.parametrize("kind", KINDS)
def test_strong_decays_give_zeros(kind: str, mean: float):
    inputs = operands(kind)
    inputs[3] = mean * (inputs[3].sign().abs() + 0.5 * torch.rand_like(inputs[3]))
    exact = passes(lambda x: theirs(x, packed()), [x.float().double() for x in inputs])
    found = passes(lambda x: ours(x, packed()), [x.float() for x in inputs])
    for mine, expected in zip(found, exact, strict=True):
        assert mine.isfinite().all()
        assert (mine - expected).abs().max() < 1e-5 * (1 + expected.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_may_be_forgotten(kind: str):
    """A decay to zero costs the tokens after it few digits, whatever the number that says so."""
    inputs, random = operands(kind), torch.Generator().manual_seed(3)
    for least in (-1e4, -torch.inf):
        inputs[3] = inputs[3].masked_fill(torch.rand(inputs[3].shape, generator=random) < 0.05, least)
        assert_close(passes(ours, inputs), passes(theirs, inputs))
        exact, found = passes(theirs, inputs), passes(ours, [x.float() for x in inputs])
        for mine, expected in zip(found, exact, strict=True):
            assert (mine - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_documents_start_without_a_cost_of_digits(kind: str):
    """The decay of a first token is never used, so it may be as large as it likes."""
    inputs, ids = operands(kind), packed()
    starts = F.pad(ids[:, 1:] != ids[:, :-1], (1, 0))
    inputs[3] = inputs[3].masked_fill(starts.view(BATCH, SEQ, *[1] * (inputs[3].dim() - 2)), -1e6)
    exact = passes(lambda x: theirs(x, ids), inputs)
    found = passes(lambda x: ours(x, ids), [x.float() for x in inputs])
    for mine, expected in zip(found, exact, strict=True):
        assert (mine - expected).abs().max() < 5e-6 * expected.abs().max()
    assert not found[5].masked_select(starts.view(BATCH, SEQ, *[1] * (inputs[3].dim() - 2))).any()


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_rounded_outside_alone(kind: str):
    """Decays are summed and the state is kept in fp32: the error is that of one rounding of each result."""
    inputs = operands(kind, decay=0.01)
    low = [x.bfloat16() if place != 3 else x.float() for place, x in enumerate(inputs[:5])]
    state = inputs[5].float()
    expected = passes(theirs, [x.double() for x in (*low, state)])
    found = passes(ours, [*low, state])
    assert [x.dtype for x in found] == [torch.bfloat16, torch.float32, *(x.dtype for x in (*low, state))]
    for mine, exact in zip(found, expected, strict=True):
        error = 2**-8 if mine.dtype == torch.bfloat16 else 1e-5
        assert (mine.double() - exact).abs().max() < error * exact.abs().max()


def test_one_token_at_a_time_is_the_recurrence():
    for kind in KINDS:
        *inputs, state = operands(kind)
        expected, last = theirs([*inputs, state])
        outs = []
        for t in range(SEQ):
            out, state = gated_delta_step(*(x[:, t] for x in inputs), state=state)
            outs.append(out)
        assert_close([torch.stack(outs, 1), state], [expected, last])


def compiled_and_checkpointed(kind: str) -> list[tuple[list[Tensor], list[Tensor]]]:
    def plain(x: list[Tensor], ids: Tensor) -> tuple[Tensor, Tensor]:
        out, state = ours([y * 2 for y in x], ids, ids[:, 0])
        return out * 2, state * 2

    def kept(x: list[Tensor], ids: Tensor) -> tuple[Tensor, Tensor]:
        return checkpoint(plain, x, ids, use_reentrant=False)  # type: ignore[return-value]  # as `plain`

    found, compiled = [], torch.compile(kept, backend="aot_eager", fullgraph=True)
    for again, ids in enumerate((packed(), packed().flip(1))):
        # Other documents are no reason to compile again.
        with torch._dynamo.config.patch(error_on_recompile=bool(again)):
            wanted = passes(plain, operands(kind, dtype=torch.float32), ids)
            found += [(passes(call, operands(kind, dtype=torch.float32), ids), wanted) for call in (kept, compiled)]
    return found


@pytest.mark.parametrize("kind", ["channel", pytest.param("head", marks=pytest.mark.night)])
def test_compiled_and_checkpointed_it_has_the_same_bits(kind: str):
    # In a process where shapes are not checked: the compiler cannot look through what does.
    [found] = run_ranks(1, compiled_and_checkpointed, kind)
    assert len(found) == 4
    for mine, exact in found:
        assert all(torch.equal(it, other) for it, other in zip(mine, exact, strict=True))


@pytest.mark.parametrize(("kind", "queries"), [("head", True), ("channel", False)])
def test_the_operator_keeps_what_it_promises(kind: str, queries: bool):
    *inputs, state = [x.requires_grad_() for x in operands(kind, seq=20, dtype=torch.float32)]
    given = (inputs[0] if queries else None, *inputs[1:], state, packed(20).cumsum(1), 16, "torch")
    torch.library.opcheck(linear_attention, given)
    gradients = [torch.randn_like(x).detach() for x in linear_attention(*given)]
    detached = [x.detach() if isinstance(x, Tensor) else x for x in given]
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(linear_attention_backward, (*gradients, *detached), test_utils=checks)


def test_backward_keeps_the_arguments_alone():
    inputs, saved = [x.requires_grad_() for x in operands("head")], list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        ours(inputs)
    known = {x.data_ptr() for x in inputs}
    assert saved
    assert all(x.data_ptr() in known for x in saved)


@pytest.mark.parametrize("seq", [64, SEQ])
@pytest.mark.parametrize("queries", [True, False])
def test_flops_are_those_of_the_matmuls_and_solves(queries: bool, seq: int):
    *inputs, state = operands("head", seq=seq)
    given = (inputs[0] if queries else None, *inputs[1:], state, None, 16, "torch")
    gradients = [torch.randn_like(x) for x in linear_attention(*given)]
    lengths = [min(16, seq - start) for start in range(0, seq, 16)]
    pairs, known = (sum(n * n for n in part) for part in (lengths, lengths[:-1]))
    for operator, args, solved in (
        (linear_attention, given, pairs),
        (linear_attention_backward, (*gradients, *given), 2 * pairs + known),
    ):
        whole, inside = FlopCounterMode(display=False), FlopCounterMode(display=False)
        with whole:
            operator(*args)
        with inside:
            operator._init_fn(*args)
        solves = solved * V * BATCH * HEADS  # torch counts none of them
        assert whole.get_total_flops() == inside.get_total_flops() + solves


def test_backends_are_chosen_by_device_and_package(monkeypatch: pytest.MonkeyPatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for installed in (False, True):
        monkeypatch.setattr(module, "has_fla", lambda installed=installed: installed)
        assert choose_linear_attention_backend("auto", cpu) == "torch"
        assert choose_linear_attention_backend("torch", cuda) == "torch"
        assert choose_linear_attention_backend("auto", cuda) == ("fla" if installed else "torch")
        with pytest.raises(UserError, match="need a GPU, and this run uses a CPU" if installed else "no module fla"):
            choose_linear_attention_backend("fla", cpu)
    assert choose_linear_attention_backend("fla", cuda) == "fla"


def documented_kernel(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    """A kernel with the documented arguments of fla-core, of which it refuses all others."""
    scale, state, ends = how.pop("scale"), how.pop("initial_state"), how.pop("cu_seqlens", None)
    assert how == {"output_final_state": True}
    if ends is None:
        return loop(q * scale, k, v, g, beta, None, state=state)
    assert len(v) == 1
    assert len(state) == len(ends) - 1
    parts = [[x[:, start:end] for x in (q * scale, k, v, g, beta)] for start, end in itertools.pairwise(ends)]
    found = [loop(*part, documents=None, state=own[None]) for part, own in zip(parts, state, strict=True)]
    outs, states = zip(*found, strict=True)
    return torch.cat(outs, dim=1), torch.cat(states)


@pytest.mark.parametrize("documents", PACKED)
@pytest.mark.parametrize("kind", KINDS)
def test_fla_gets_documents_as_sequences_of_one_row(monkeypatch: pytest.MonkeyPatch, kind: str, documents: str):
    for path, name in (("gated_delta_rule", "chunk_gated_delta_rule"), ("kda", "chunk_kda")):
        package = ModuleType(f"fla.ops.{path}")
        setattr(package, name, documented_kernel if ("kda" in path) == (kind == "channel") else None)
        monkeypatch.setitem(sys.modules, package.__name__, package)
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    ids, carry = PACKED[documents]
    found = passes(lambda x: ours(x, ids, carry, backend="fla"), operands(kind))
    assert_close(found, expected(kind, documents))
    maps = [
        passes(lambda x, how=how: [transition(*x, documents=ids, carry=carry, backend=how)], operands(kind)[1:5])
        for how in get_args(LinearAttentionBackend)
    ]
    assert_close(*maps)


def test_the_core_starts_from_zero():
    *inputs, state = operands("head")
    found = GatedDeltaCore(chunk=16)(*inputs, packed())
    assert_close([found], [theirs([*inputs, torch.zeros_like(state)], packed(), torch.tensor([-1, -1]))[0]])
