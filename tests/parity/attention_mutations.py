"""Mutations of windows, chunks, sinks and biases in parallel, each of which the parity tests must notice.

One of FlexAttention's, which the comparison with the whole score matrix must.

python -m pytest tests/parity/attention_mutations.py
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ops.test_attention_patterns import test_attention_is_softmax_over_visible_keys as assert_softmax
from tests.parity.runs import mutation_test
from tests.parity.test_attention import EXPERIMENTS
from tests.patching import patch
from titan_exp.ops.attention import sdpa
from titan_exp.ops.attention.mask_pattern import MaskPattern

TENSOR = "titan_exp.parallel.tensor_parallel"
CONTEXT = "titan_exp.parallel.context_parallel"


def biases_are_added_by_every_tensor_parallel_rank() -> None:
    def make(_: Any) -> Any:
        def forward(self: Any, x: Any) -> Any:
            from titan_exp.models.blocks.linear import add_bias
            from titan_exp.ops.autograd import local_tensor

            return self.region.reduce_output(add_bias(self.linear_impl(x, local_tensor(self.weight)), self.bias))

        return forward

    patch(f"{TENSOR}.layers.RowParallelLinear.forward", make)


def gradients_of_rowwise_biases_are_taken_for_whole_ones() -> None:
    patch(
        f"{TENSOR}.styles.mark_partial",
        lambda original: lambda module, *names: None if names == ("bias",) else original(module, *names),
    )


def sinks_are_those_of_the_first_rank() -> None:
    def make(original: Any) -> Any:
        def __init__(self: Any, *args: Any) -> None:
            original(self, *args)
            self.rank = 0

        return __init__

    patch(f"{CONTEXT}.apply.UlyssesAttention.__init__", make)


def sinks_are_left_out_of_the_merged_lse() -> None:
    patch(
        f"{CONTEXT}.attention.merge_sinks",
        lambda original: lambda out, lse, sinks: (original(out, lse, sinks)[0], lse),
    )


def sinks_get_the_gradient_of_the_first_part() -> None:
    patch(f"{CONTEXT}.attention.sinks_grad", lambda original: lambda *given: original(*given) * (dist.get_rank() == 0))


def sinks_of_later_heads_get_no_gradient() -> None:
    def make(original: Any) -> Any:
        def forward(self: Any) -> Any:
            sinks = original(self)
            return sinks if dist.get_rank() == 0 else sinks.detach() + 0 * sinks

        return forward

    patch("titan_exp.models.blocks.transformer.AttentionSinks.forward", make)


def _with_pattern(change: Callable[[MaskPattern], MaskPattern]) -> None:
    for name in ("_tiles", "_bias"):
        patch(
            f"{CONTEXT}.attention.{name}",
            lambda original: lambda pattern, *rest, **how: original(change(pattern), *rest, **how),
        )


def parts_see_one_key_beyond_the_window() -> None:
    _with_pattern(lambda pattern: MaskPattern(pattern.window and pattern.window + 1, pattern.chunk))


def chunks_of_parts_end_one_key_later() -> None:
    _with_pattern(lambda pattern: MaskPattern(pattern.window, pattern.chunk and pattern.chunk + 1))


def chunks_begin_with_the_part() -> None:
    patch(
        f"{CONTEXT}.attention._places",
        lambda _: lambda pieces, device: torch.arange(sum(map(len, pieces)), device=device),
    )


def attention_knows_no_cuts() -> None:
    patch(
        f"{CONTEXT}.apply.ContextAttention",
        lambda original: lambda *given: original(*given[:-1], ()),
    )


def temperatures_are_those_of_the_part() -> None:
    patch(
        "titan_exp.ops.attention.rope.TemperatureTable.forward",
        lambda original: lambda self, seq, _: original(self, seq, None),
    )


def other_documents_are_visible_in_whole_tiles() -> None:
    """Of windows and chunks; the causal mask has no such tile of the own block."""

    def make(original: Any) -> Any:
        def bias(pattern: MaskPattern, segments: Any, tile: Any, **blocks: Any) -> Any:
            is_whole = tile.kind == "whole" and not pattern.is_causal
            return original(pattern, None if is_whole else segments, tile, **blocks)

        return bias

    patch(f"{CONTEXT}.attention._bias", make)


RING = "parallelism.cp=2 parallelism.cp_method=ring"
GATHERED = "parallelism.cp=2 parallelism.cp_method=allgather"
NOTICED: list[tuple[str, str, Callable[[], None]]] = [
    ("mixed", "parallelism.tp=2 parallelism.sequence_parallel=false", biases_are_added_by_every_tensor_parallel_rank),
    ("mixed", "parallelism.tp=2", gradients_of_rowwise_biases_are_taken_for_whole_ones),
    ("mixed", "parallelism.cp=2 parallelism.cp_method=ulysses", sinks_are_those_of_the_first_rank),
    ("mixed", RING, sinks_are_left_out_of_the_merged_lse),
    ("mixed", GATHERED, sinks_get_the_gradient_of_the_first_part),
    ("mixed", "parallelism.tp=2", sinks_of_later_heads_get_no_gradient),
    ("mixed", RING, parts_see_one_key_beyond_the_window),
    ("mixed", GATHERED, parts_see_one_key_beyond_the_window),
    ("mixed", RING, chunks_of_parts_end_one_key_later),
    ("mixed", GATHERED, chunks_of_parts_end_one_key_later),
    ("mixed", RING, attention_knows_no_cuts),
    ("long documents", RING, other_documents_are_visible_in_whole_tiles),
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
        plain = getattr(sdpa, name)
        monkeypatch.setattr(f"titan_exp.ops.attention.sdpa.{name}", lambda _, *rest, plain=plain: plain(wider, *rest))
    with pytest.raises(AssertionError):
        assert_softmax("flex", pattern, packed, True)
