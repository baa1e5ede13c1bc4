"""Mutations of Llama 4, each of which the comparison with `transformers` or the parity tests must notice.

python -m pytest tests/parity/llama4_mutations.py
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.models.test_deepseek import in_transformers
from tests.models.test_gpt_oss import differences, noisy_model
from tests.models.test_llama4 import SHAPE
from tests.models.test_qwen3 import exported
from tests.parity.runs import mutation_test
from tests.parity.test_llama4 import EXPERIMENTS
from tests.patching import patch
from titan_exp.models.llama4 import STATE_DICTS, Config

Change = Callable[[pytest.MonkeyPatch], Config | None]
"""Breaks something, or returns a configuration that does."""


def chunks_have_one_key_more(_: pytest.MonkeyPatch) -> Config:
    return replace(SHAPE, chunk=SHAPE.chunk + 1)


def the_first_layer_of_four_has_no_rope(monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_exp.models import llama4

    plain = llama4._layer
    monkeypatch.setattr(
        llama4,
        "_layer",
        lambda config, layer: replace(plain(config, layer), attention=plain(config, 3 - layer).attention),
    )


def the_temperature_counts_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_exp.ops.attention.rope import TemperatureTable

    plain = TemperatureTable.reset

    def reset(self: Any) -> None:
        plain(self)
        self.factors[1:] = self.factors[:-1].clone()

    monkeypatch.setattr(TemperatureTable, "reset", reset)


def the_temperature_scales_rotated_layers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_exp.models.llama4 import AttentionVariant, QueryTemperature

    monkeypatch.setattr(
        "titan_exp.models.llama4.AttentionVariant",
        lambda **options: AttentionVariant(**{**options, "temperature": QueryTemperature(0.1, 8)}),
    )


def norms_span_half_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.nn.functional as F

    plain = F.rms_norm

    def norm(x: Tensor, shape: Any, weight: Any = None, eps: Any = None) -> Tensor:
        if weight is not None:
            return plain(x, shape, weight, eps)
        return plain(x.unflatten(-1, (2, -1)), (x.shape[-1] // 2,), None, eps).flatten(-2)

    monkeypatch.setattr(F, "rms_norm", norm)


def wavelengths_are_blended(_: pytest.MonkeyPatch) -> Config:
    return replace(SHAPE, rope=replace(SHAPE.rope, high_freq_factor=4.0))


def rope_rotates_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STATE_DICTS, "huggingface", replace(STATE_DICTS["huggingface"], interleaved=False))


def gate_and_up_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STATE_DICTS, "huggingface", replace(STATE_DICTS["huggingface"], alternating_gate_up=True))


def weights_scale_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_exp.models.llama4 import MoEVariant

    monkeypatch.setattr("titan_exp.models.llama4.MoEVariant", lambda **_: MoEVariant())


def weights_of_inputs_get_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_exp.models.blocks.feed_forward import weigh_rows

    monkeypatch.setattr(
        "titan_exp.models.blocks.feed_forward.weigh_rows", lambda rows, weights: weigh_rows(rows, weights.detach())
    )


def weights_are_a_softmax(_: pytest.MonkeyPatch) -> Config:
    return replace(SHAPE, moe=replace(SHAPE.moe, score="softmax"))


AGAINST_TRANSFORMERS: tuple[Change, ...] = (
    chunks_have_one_key_more,
    the_first_layer_of_four_has_no_rope,
    the_temperature_counts_from_zero,
    the_temperature_scales_rotated_layers_too,
    norms_span_half_a_head,
    wavelengths_are_blended,
    rope_rotates_halves,
    gate_and_up_alternate,
    weights_scale_outputs,
    weights_of_inputs_get_no_gradient,
    weights_are_a_softmax,
)


@pytest.mark.parametrize("mutate", AGAINST_TRANSFORMERS, ids=lambda mutate: mutate.__name__)
def test_mutation_differs_from_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutate: Change):
    before = exported(noisy_model(SHAPE), SHAPE, tmp_path / "before")
    config = mutate(monkeypatch) or SHAPE
    ours = noisy_model(config)
    maps = (rope_rotates_halves, gate_and_up_alternate)
    theirs = in_transformers(exported(ours, config, tmp_path / "after") if mutate in maps else before)
    found = differences(ours, theirs, SHAPE)
    assert not (found.pop("logits") < 1e-5 and all(value < 1e-4 for value in found.values()))


def inputs_are_weighted_on_one_rank_only() -> None:
    patch(
        "titan_exp.parallel.expert_parallel.weigh_rows",
        lambda _: lambda rows, weights: rows + 0 * weights[:, None],
    )


NOTICED: list[tuple[str, str, Callable[[], None]]] = [
    ("experts", "parallelism.dp_shard=2 parallelism.ep=2", inputs_are_weighted_on_one_rank_only),
]
"""Experiment, layout and mutation."""

test_mutation_is_noticed = mutation_test(EXPERIMENTS, NOTICED)
