"""Mutations of windows, chunks, sinks and biases in parallel, each of which the parity tests must notice.

One of FlexAttention's, which the comparison with the whole score matrix must.

python -m pytest tests/parity/attention_mutations.py
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.ops.test_attention_patterns import test_attention_is_softmax_over_visible_keys as assert_softmax
from tests.parity.runs import mutation_test
from tests.parity.test_attention import EXPERIMENTS
from tests.patching import patch
from titan_exp.ops.attention import flex
from titan_exp.ops.attention.mask_pattern import MaskPattern

TENSOR = "titan_exp.parallel.tensor_parallel"
CONTEXT = "titan_exp.parallel.context_parallel"


def biases_are_added_by_every_tensor_parallel_rank() -> None:
    def make(_: Any) -> Any:
        def forward(self: Any, x: Any) -> Any:
            from titan_exp.models.blocks.linear import add_bias
            from titan_exp.ops.local_tensor import local_tensor

            return self.region.reduce_output(add_bias(self.linear_impl(x, local_tensor(self.weight)), self.bias))

        return forward

    patch(f"{TENSOR}.layers.RowParallelLinear.forward", make)


def gradients_of_rowwise_biases_are_taken_for_whole_ones() -> None:
    patch(
        f"{TENSOR}.apply.mark_partial",
        lambda original: lambda module, *names: None if names == ("bias",) else original(module, *names),
    )


def sinks_are_those_of_the_first_rank() -> None:
    def make(original: Any) -> Any:
        def __init__(self: Any, *args: Any) -> None:
            original(self, *args)
            self.rank = 0

        return __init__

    patch(f"{CONTEXT}.ulysses.UlyssesAttention.__init__", make)


def sinks_are_left_out_of_the_merged_lse() -> None:
    patch(
        f"{CONTEXT}.attention.merge_sinks",
        lambda original: lambda out, lse, sinks: (original(out, lse, sinks)[0], lse),
    )


def parts_see_one_key_beyond_the_window() -> None:
    def make(original: Any) -> Any:
        def tiles(pattern: Any, *blocks: Any) -> Any:
            return original(MaskPattern(pattern.window and pattern.window + 1, pattern.chunk), *blocks)

        return tiles

    patch(f"{CONTEXT}.attention._tiles", make)
    patch(
        f"{CONTEXT}.attention._bias",
        lambda original: (
            lambda pattern, *rest, **how: original(
                type(pattern)(pattern.window and pattern.window + 1, pattern.chunk), *rest, **how
            )
        ),
    )


def chunks_begin_with_the_part() -> None:
    def make(_: Any) -> Any:
        def places(rank: int, degree: int, length: int, device: Any) -> Any:
            return torch.arange(length, device=device)

        return places

    patch(f"{CONTEXT}.attention._places", make)


def temperatures_are_those_of_the_part() -> None:
    patch(
        "titan_exp.ops.attention.query_temperature.TemperatureTable.forward",
        lambda original: lambda self, seq, _: original(self, seq, None),
    )


RING = "parallelism.cp=2 parallelism.cp_method=ring"
NOTICED: list[tuple[str, str, Callable[[], None]]] = [
    ("mixed", "parallelism.tp=2 parallelism.sequence_parallel=false", biases_are_added_by_every_tensor_parallel_rank),
    ("mixed", "parallelism.tp=2", gradients_of_rowwise_biases_are_taken_for_whole_ones),
    ("mixed", "parallelism.cp=2 parallelism.cp_method=ulysses", sinks_are_those_of_the_first_rank),
    ("mixed", RING, sinks_are_left_out_of_the_merged_lse),
    ("mixed", RING, parts_see_one_key_beyond_the_window),
    ("positions restart", RING, chunks_begin_with_the_part),
    ("mixed", RING, temperatures_are_those_of_the_part),
]
"""Experiment, layout and mutation."""

test_mutation_is_noticed = mutation_test(EXPERIMENTS, NOTICED)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("pattern", [MaskPattern(7), MaskPattern(chunk=8)], ids=str)
@pytest.mark.parametrize("packed", ["no", "documents"])
def test_a_block_mask_with_one_key_more_is_noticed(monkeypatch: pytest.MonkeyPatch, pattern: MaskPattern, packed: str):
    wider = MaskPattern(pattern.window and pattern.window + 1, pattern.chunk and pattern.chunk + 1)
    assert_softmax("flex", pattern, packed, True)
    for name in ("pattern_mask", "block_mask"):
        plain = getattr(flex, name)
        monkeypatch.setattr(f"titan_exp.ops.attention.sdpa.{name}", lambda _, *rest, plain=plain: plain(wider, *rest))
    with pytest.raises(AssertionError):
        assert_softmax("flex", pattern, packed, True)
