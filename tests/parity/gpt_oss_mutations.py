"""Mutations of GPT-OSS, each of which the comparison with `transformers` or the parity tests must notice.

python -m pytest tests/parity/gpt_oss_mutations.py
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.test_deepseek import in_transformers
from tests.models.test_gpt_oss import SHAPE, differences, noisy_model
from tests.models.test_gpt_oss import test_published_mxfp4_blocks_are_read_exactly as assert_blocks_are_exact
from tests.models.test_qwen3 import exported
from tests.parity.runs import mutation_test
from tests.parity.test_gpt_oss import EXPERIMENTS
from tests.patching import patch
from titan_exp.checkpoint.formats.safetensors import MXFP4Reader
from titan_exp.models.gpt_oss import STATE_DICTS, Config

Change = Callable[[pytest.MonkeyPatch], Config | None]
"""Breaks something, or returns a configuration that does."""


def sinks_are_left_out_of_the_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_exp.ops.attention.attention_with_lse import math_attention_with_sinks as plain

    def softmax(scores: Any, dim: int) -> Any:
        shifted = (scores - scores[..., :-1].amax(dim, keepdim=True).detach()).exp()
        return shifted / shifted.sum(dim, keepdim=True)

    def attend(*tensors: Any, **how: Any) -> Any:
        with monkeypatch.context() as inside:
            inside.setattr("torch.Tensor.softmax", softmax)
            return plain(*tensors, **how)

    monkeypatch.setattr("titan_exp.ops.attention.sdpa.math_attention_with_sinks", attend)


def sinks_get_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "titan_exp.ops.attention.attention_with_lse.sinks_grad", lambda *given: torch.zeros_like(given[-1])
    )


def the_window_has_one_key_more(_: pytest.MonkeyPatch) -> Config:
    return replace(SHAPE, window=SHAPE.window + 1)


def the_ramp_of_yarn_is_truncated(_: pytest.MonkeyPatch) -> Config:
    return replace(SHAPE, rope=replace(SHAPE.rope, truncate=True))


def cosines_keep_their_magnitude(_: pytest.MonkeyPatch) -> Config:
    return replace(SHAPE, rope=replace(SHAPE.rope, mscale=0.0))


def weights_are_a_softmax_over_all_experts(_: pytest.MonkeyPatch) -> Config:
    return replace(SHAPE, moe=replace(SHAPE.moe, normalized=False))


def the_router_has_no_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_exp.models.blocks.feed_forward.add_bias", lambda logits, bias: logits + 0 * bias)


def biases_of_experts_are_not_weighted(monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_exp.ops.moe.grouped_mm import add_expert_bias

    monkeypatch.setattr(
        "titan_exp.models.blocks.linear.add_expert_bias",
        lambda rows, bias, ends, weights=None: add_expert_bias(rows, bias, ends),
    )


def weights_get_no_gradient_from_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_exp.ops.moe.grouped_mm import add_expert_bias

    monkeypatch.setattr(
        "titan_exp.models.blocks.linear.add_expert_bias",
        lambda rows, bias, ends, weights=None: add_expert_bias(
            rows, bias, ends, None if weights is None else weights.detach()
        ),
    )


def the_gate_is_limited_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_exp.ops import swiglu

    plain = swiglu._clamped

    def clamped(gate_up: Any, variant: Any, group: int) -> Any:
        gate, up = plain(gate_up, variant, group)
        return gate.clamp(min=-variant.limit), up

    monkeypatch.setattr(swiglu, "_clamped", clamped)


def gradients_pass_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.Tensor.masked_fill_", lambda tensor, *_: tensor)


def up_has_no_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_exp.ops.swiglu_variant import SwiGLUVariant

    monkeypatch.setattr(
        "titan_exp.models.gpt_oss.SwiGLUVariant",
        lambda alpha, limit, offset: SwiGLUVariant(alpha, limit, 0.0),
    )


def gate_and_up_are_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STATE_DICTS, "huggingface", replace(STATE_DICTS["huggingface"], alternating_gate_up=False))


def a_square_expert_is_transposed(monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_exp.checkpoint.formats.mapping import ExportReader

    plain = ExportReader.read

    def read(self: ExportReader, name: str, *window: slice) -> Any:
        found = plain(self, name, *window)
        return found.mT if name.endswith("down_proj") else found

    monkeypatch.setattr(ExportReader, "read", read)


AGAINST_TRANSFORMERS: tuple[Change, ...] = (
    sinks_are_left_out_of_the_maximum,
    sinks_get_no_gradient,
    the_window_has_one_key_more,
    the_ramp_of_yarn_is_truncated,
    cosines_keep_their_magnitude,
    weights_are_a_softmax_over_all_experts,
    the_router_has_no_bias,
    biases_of_experts_are_not_weighted,
    weights_get_no_gradient_from_biases,
    the_gate_is_limited_on_both_sides,
    gradients_pass_the_limit,
    up_has_no_offset,
    gate_and_up_are_halves,
    a_square_expert_is_transposed,
)


@pytest.mark.parametrize("mutate", AGAINST_TRANSFORMERS, ids=lambda mutate: mutate.__name__)
def test_mutation_differs_from_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutate: Change):
    before = exported(noisy_model(SHAPE), SHAPE, tmp_path / "before")
    config = mutate(monkeypatch) or SHAPE
    # The kernels' log-sum-exp knows no maximum.
    ours = noisy_model(config, "math" if mutate is sinks_are_left_out_of_the_maximum else "flash")
    # What a mutated map writes is read by another implementation; what a mutated model computes is not exported.
    maps = (gate_and_up_are_halves, a_square_expert_is_transposed)
    theirs = in_transformers(exported(ours, config, tmp_path / "after") if mutate in maps else before)
    found = differences(ours, theirs, SHAPE)
    assert not (found.pop("logits") < 1e-5 and all(value < 1e-4 for value in found.values()))


def test_the_upper_half_of_a_byte_read_first_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plain = MXFP4Reader.__init__

    def flipped(self: Any, store: Any) -> None:
        plain(self, store)
        self._pairs = self._pairs.flip(1)

    monkeypatch.setattr(MXFP4Reader, "__init__", flipped)
    with pytest.raises(AssertionError):
        assert_blocks_are_exact(tmp_path)


def biases_of_all_channels_are_added_at_the_front() -> None:
    def make(original: Any) -> Any:
        def shard(linear: Any, axes: Any, *, channels: int) -> None:
            original(linear, axes, channels=channels)
            linear.bias_start = 0

        return shard

    patch("titan_exp.parallel.expert_parallel._shard", make)


def every_rank_adds_the_whole_bias_of_the_down_projection() -> None:
    """Where two ranks' outputs are summed."""
    patch(
        "titan_exp.models.blocks.linear.add_expert_bias",
        lambda original: (
            lambda rows, bias, ends, weights=None: original(rows, bias if weights is None else 2 * bias, ends, weights)
        ),
    )


def gradients_of_the_routers_bias_are_one_ranks() -> None:
    patch(
        "titan_exp.parallel.expert_parallel.mark_partial",
        lambda original: lambda module: original(module, "weight"),
    )


def sinks_and_biases_that_ranks_hold_whole_keep_their_own_gradients() -> None:
    patch("titan_exp.parallel.tensor_parallel.styles.mark_partial", lambda _: lambda *_: None)


ETP = "parallelism.tp=2 parallelism.etp=2"
NOTICED: list[tuple[str, str, Callable[[], None]]] = [
    ("limited", ETP, biases_of_all_channels_are_added_at_the_front),
    ("limited", ETP, every_rank_adds_the_whole_bias_of_the_down_projection),
    ("limited", ETP, gradients_of_the_routers_bias_are_one_ranks),
    (
        "few heads",
        "parallelism.tp=2 parallelism.dp_shard=4 parallelism.sequence_parallel=false",
        sinks_and_biases_that_ranks_hold_whole_keep_their_own_gradients,
    ),
]
"""Experiment, layout and mutation."""

test_mutation_is_noticed = mutation_test(EXPERIMENTS, NOTICED)
