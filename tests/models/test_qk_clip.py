"""Factors of QK-Clip multiply the logits of each head by the head's own, and leave values alone."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.config.composing import experiment
from titan_exp.config.errors.user_error import UserError
from titan_exp.models.build import build_model
from titan_exp.ops.attention.attention_with_lse import MaxLogits
from titan_exp.parallel.qk_clip import QKClip, _attentions

HALVES = ["model=llama_debug", "model.kv_heads=4"]


@pytest.mark.parametrize("words", [["model=llama_debug"], HALVES, ["model=deepseek_debug"]], ids=" ".join)
def test_factors_multiply_the_logits_of_each_head(words: list[str]):
    config = experiment(*words).model
    model = build_model(config, seq_len=32, attention_backend="flash")
    model.reset_buffers()  # type: ignore[operator]  # the decoder's own
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2 if parameter.ndim > 1 else 1.0, generator=generator)
    attention: Any = model.get_submodule("blocks.0.attention")
    assert dict(_attentions(model))["blocks.0.attention"] is attention
    heads = attention.spec.heads
    attention.core.max_logits = MaxLogits(heads, "0", torch.device("cpu"))
    tokens = torch.randint(config.vocab_size, (2, 32), generator=generator)
    value_rows = {name: weight.clone() for name, weight in attention.named_parameters()}
    model(tokens)
    before = attention.core.max_logits.largest.clone()
    factors = torch.linspace(0.3, 1.0, heads)
    for name, rows in attention.clip_factors(factors).items():
        attention.get_submodule(name).weight.data.mul_(rows[:, None])
    attention.core.max_logits.reset_metrics()
    model(tokens)
    assert before.min() > 0
    torch.testing.assert_close(attention.core.max_logits.largest, factors * before)
    changed = {name for name, weight in attention.named_parameters() if not torch.equal(weight, value_rows[name])}
    assert changed == {f"{name}.weight" for name in attention.clip_factors(factors)}


def test_a_key_of_one_query_head_takes_half_and_a_shared_one_nothing():
    def rows(*words: str) -> torch.Tensor:
        model = build_model(experiment(*words).model, seq_len=32, attention_backend="flash")
        attention: Any = model.get_submodule("blocks.0.attention")
        found = attention.clip_factors(torch.full((4,), 0.25))["qkv"]
        return found.unflatten(0, (-1, attention.group + 2, attention.head_dim))[0, :, 0]

    assert rows(*HALVES).tolist() == [0.5, 0.5, 1]
    assert rows("model=llama_debug").tolist() == [0.25, 0.25, 1, 1]


def test_a_model_without_attention_to_clip_is_refused():
    mesh: Any = SimpleNamespace(device=torch.device("cpu"))
    with pytest.raises(UserError, match=r"qk_clip=100 .*no attention of Linear has .* or use optimizer.qk_clip=null"):
        QKClip(torch.nn.Linear(2, 2), [], 100.0, mesh)
