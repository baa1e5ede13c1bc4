"""Mutations of linear attention, alone, over a sharded sequence and in a trained hybrid. Tests must notice each.

python -m pytest tests/parity/hybrid_mutations.py
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.ops import test_linear_attention as alone
from tests.parallel.test_context_linear_attention import CONTIGUOUS, ZIGZAG, errors, layout
from tests.parity.runs import assert_noticed, remembered
from tests.parity.test_hybrids import EXPERIMENTS, KIMI
from tests.patching import Mutation, noticed, patch
from tests.ranks import run_ranks

OPS, CONTEXT = "titan_exp.ops.linear_attention", "titan_exp.parallel.context_parallel.apply"
BLOCK = "titan_exp.models.blocks.mixers"


def states_are_not_reset() -> None:
    patch(f"{OPS}._runs", lambda _: lambda documents, carry: None)


def states_are_reset_where_segments_start() -> None:
    patch(f"{OPS}._runs", lambda original: lambda ids, carry: original(ids, torch.full_like(ids[:, 0], -1)))


def decays_are_rounded_to_bf16() -> None:
    patch(
        f"{OPS}.read_chunk",
        lambda original: lambda q, k, v, g, *rest: original(q, k, v, g.bfloat16(), *rest),
    )


def decays_start_after_their_token() -> None:
    patch(
        f"{OPS}.read_chunk",
        lambda original: lambda q, k, v, g, *rest: original(q, k, v, g.roll(1, 1), *rest),
    )


def documents_are_told_by_number_alone() -> None:
    """A number that comes again is not another document."""
    patch(f"{OPS}._runs", lambda _: lambda documents, carry: documents)


def far_pairs_see_other_documents() -> None:
    """Between blocks of a chunk; only decays by channel have them."""

    def make(original: Any) -> Any:
        def scores(chunk: Any) -> Any:
            open_ = torch.ones_like(chunk.visible).tril()
            blocks = torch.arange(open_.shape[-1]) // 16
            far = blocks[:, None] != blocks
            return original(replace(chunk, visible=torch.where(far, open_, chunk.visible)))

        return scores

    patch("titan_exp.ops.delta_chunk._scores", make)


def gradients_of_decays_skip_the_last_state() -> None:
    def make(original: Any) -> Any:
        def backward(chunk: Any, state: Any, out_grad: Any, state_grad: Any) -> Any:
            rows, keys, values, decay, *rest = original(chunk, state, out_grad, state_grad)
            part = (chunk.whole * state * state_grad).sum(-1)
            lost = part.sum(-1, keepdim=True) if decay.shape[-1] == 1 else part
            return rows, keys, values, decay - lost[:, :, None], *rest

        return backward

    patch(f"{OPS}.chunk_backward", make)


def without_documents(convolve: Any) -> Any:
    return lambda x, weight, documents, before=None, *_, **how: convolve(x, weight, None, before, **how)


def patch_on_ranks(name: str, make: Callable[[Any], Any]) -> None:
    """Replace an operator of linear attention where context-parallel ranks call it, and not in one process."""
    patch(f"{CONTEXT}.linear_attention", lambda ops: SimpleNamespace(**{**vars(ops), name: make(getattr(ops, name))}))


def inputs_cross_documents() -> None:
    patch_on_ranks("short_convolution", without_documents)


def inputs_before_a_segment_are_zeros() -> None:
    patch(
        f"{CONTEXT}.SegmentExchange.previous",
        lambda original: lambda self, *given: original(self, *given) * (not given[1][0].is_floating_point()),
    )


def inputs_before_a_segment_get_no_gradient() -> None:
    patch(f"{CONTEXT}.neighbours", lambda original: lambda ends, *how: original(ends.detach(), *how))


def one_segment_late(states_before: Any) -> Any:
    return lambda maps, width, order, own, *groups: states_before(
        maps, width, order, [max(0, place - 1) for place in own], *groups
    )


def states_come_one_segment_late() -> None:
    patch(f"{CONTEXT}.states_before", one_segment_late)


def states_get_no_gradient() -> None:
    patch(f"{CONTEXT}.states_before", lambda original: lambda maps, *how: original(maps.detach(), *how))


def segments_go_by_rank() -> None:
    def make(original: Any) -> Any:
        def segments(*given: Any) -> Any:
            found = original(*given)
            places = sorted(found.order)
            own = [places.index(found.order[place]) for place in found.own]
            return replace(found, order=places, own=own)

        return segments

    patch(f"{CONTEXT}.segments_of", make)


def segments_do_not_know_their_documents() -> None:
    """The first document of a segment goes on from the last one before it."""
    patch_on_ranks("gated_delta", lambda original: lambda *given, carry, **how: original(*given, carry=None, **how))


def error_of_the_rule(kind: str, mutate: Callable[[], None] | None) -> float:
    """Largest error against the loop over tokens, of a row's documents and of its segments."""
    if mutate is not None:
        mutate()
    ids, largest = alone.packed(), 0.0
    for carry in (torch.tensor([0, -1]), torch.tensor([0, 0])):
        found = alone.passes(alone.ours, alone.operands(kind), ids, carry)
        expected = alone.passes(alone.theirs, alone.operands(kind), ids, carry)
        pairs = zip(found, expected, strict=True)
        largest = max(largest, *(float((mine - exact).abs().max() / exact.abs().max()) for mine, exact in pairs))
    return largest


OF_THE_RULE: list[tuple[str, Callable[[], None]]] = [
    ("head", states_are_not_reset),
    ("channel", states_are_reset_where_segments_start),
    ("head", decays_are_rounded_to_bf16),
    ("channel", decays_start_after_their_token),
    ("head", documents_are_told_by_number_alone),
    ("channel", far_pairs_see_other_documents),
    ("head", gradients_of_decays_skip_the_last_state),
]
"""Kind of decay and mutation."""

OF_SHARDS: list[tuple[str, Callable[[], None]]] = [
    (CONTIGUOUS, inputs_cross_documents),
    (CONTIGUOUS, inputs_before_a_segment_are_zeros),
    (ZIGZAG, inputs_before_a_segment_get_no_gradient),
    (ZIGZAG, states_come_one_segment_late),
    (CONTIGUOUS, states_get_no_gradient),
    (ZIGZAG, segments_go_by_rank),
    (ZIGZAG, segments_do_not_know_their_documents),
]
"""Order of tokens and mutation."""


@pytest.mark.parametrize(("kind", "mutate"), OF_THE_RULE, ids=lambda case: getattr(case, "__name__", case))
def test_a_mutation_of_the_rule_is_noticed(kind: str, mutate: Callable[[], None]):
    [plain], [found] = (run_ranks(1, error_of_the_rule, kind, change) for change in (None, mutate))
    assert plain < 1e-12
    assert not found < 1e-12


@pytest.mark.parametrize(("order", "mutate"), OF_SHARDS, ids=lambda case: getattr(case, "__name__", case))
def test_a_mutation_of_shards_is_noticed(order: str, mutate: Callable[[], None]):
    layouts = [(layout("cp=2", order), (), "plainly")]
    for found in zip(*run_ranks(2, errors, layouts, ["head"], mutate), strict=True):
        assert not max(found) < 1e-12


def before_the_norm(forward: Any) -> Any:
    """norm(out · gate) in place of norm(out) · gate."""

    def gated(self: Any, x: Any, rope: Any, mask: Any) -> Any:
        gate = self._gates(x, self.gather(x))[1].unflatten(-1, (-1, self.spec.value_dim))
        gate = F.silu(gate) if self.spec.gate == "silu" else gate.sigmoid()
        hooks = (
            self.out_norm.register_forward_pre_hook(lambda _, inputs: (inputs[0] * gate,)),
            self.out_norm.register_forward_hook(lambda _, inputs, out: out / gate),
        )
        try:
            return forward(self, x, rope, mask)
        finally:
            for hook in hooks:
                hook.remove()

    return gated


def of_the_neighbouring_head(of_rank: Any) -> Any:
    """Under tensor parallelism, a rank gives its heads each other's numbers."""

    def rolled(self: Any, name: str) -> Any:
        found = of_rank(self, name)
        return found if found.shape == getattr(self, name).shape else found.roll(1, 0)

    return rolled


MODEL = "tests/models/test_hybrids.py::test_"
ALONE, EQUAL = f"{MODEL}documents_of_a_row_do_not_see_each_other", f"{MODEL}logits_choices_and_gradients_equal"
ROLES, RANKS = f"{MODEL}initial_decays_and_roles", ""
MUTATIONS: dict[str, Mutation] = {
    "states go on": (f"{OPS}._runs", lambda _: lambda *given: None, ALONE),
    "windows cross documents": (f"{OPS}.short_convolution", without_documents, ALONE),
    "decays in bf16": (
        f"{BLOCK}.ForgetGate.forward",
        lambda original: lambda self, x: original(self, x).bfloat16().to(torch.float32),
        EQUAL,
    ),
    "rates in bf16": (
        f"{BLOCK}.ForgetGate.keeps_fp32",
        lambda _: False,
        f"{MODEL}decays_stay_in_fp32_under_mixed_precision",
    ),
    "the gate before the norm": (f"{BLOCK}.LinearAttention.forward", before_the_norm, EQUAL),
    "filters as matrices": (f"{BLOCK}.Filters.parameter_role", lambda _: "matrix", ROLES),
    "numbers of another head": (
        "titan_exp.models.blocks.transformer.HeadNumbers.of_rank",
        of_the_neighbouring_head,
        RANKS,
    ),
    "a state too late": (f"{CONTEXT}.states_before", one_segment_late, RANKS),
}
"""Mutations of a hybrid, each with a test by day that notices it. Those of ranks show in the curves below and in
`OF_SHARDS` alone, whose layouts run by day."""
MUON = f"{KIMI} optimizer=muon"
IN_THE_TRAINER = {
    "states go on": ("next_documents", "parallelism.tp=2"),
    "windows cross documents": ("kimi_documents", "parallelism.dp_shard=2"),
    "decays in bf16": ("kimi", "parallelism.tp=2"),
    "the gate before the norm": ("dense", "parallelism.tp=2"),
    "filters as matrices": ("muon", "parallelism.dp_shard=2"),
    "numbers of another head": ("olmo", "parallelism.pp=2 parallelism.tp=2"),
    "a state too late": ("next_documents", "parallelism.cp=2 parallelism.cp_method=ring"),
}
"""Experiment and layout in which a curve shows the mutation."""

test_a_test_by_day_notices = noticed(__name__, {name: found for name, found in MUTATIONS.items() if found[2]})


def mutate_model(name: str) -> None:
    patch(*MUTATIONS[name][:2])


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return remembered(lambda: tmp_path_factory.mktemp("one"), {**EXPERIMENTS, "muon": MUON})


@pytest.mark.parametrize("name", IN_THE_TRAINER)
def test_a_curve_shows_it(tmp_path: Path, one_device, name: str):
    experiment, layout = IN_THE_TRAINER[name]
    words = [*{**EXPERIMENTS, "muon": MUON}[experiment].split(), *layout.split()]
    assert_noticed(tmp_path / "many", words, partial(mutate_model, name), one_device(experiment))
