"""Tables of `config.json`: a family's keys come back, and what cannot be a key's value is refused by its name."""

import json
from typing import Any

import pytest

from tests.config.composing import experiment
from titan_exp.config.errors.user_error import UserError
from titan_exp.models.convert.hf_config import from_huggingface, to_huggingface

PRESETS = (
    "deepseek_debug",
    "gpt_oss_debug",
    "llama_debug",
    "llama4_debug",
    "olmo2_debug",
    "qwen3_debug",
    "qwen3_moe_debug",
)


def values_of(preset: str) -> dict[str, Any]:
    written = to_huggingface(experiment(f"model={preset}").model, dtype="bfloat16", special_tokens={})
    return json.loads(json.dumps(written))


@pytest.mark.parametrize("preset", PRESETS)
def test_what_a_family_writes_is_what_it_reads(preset: str):
    values = values_of(preset)
    again = to_huggingface(from_huggingface(values, "again"), dtype="bfloat16", special_tokens={})
    written_only = {"router_aux_loss_coef"} if preset.startswith(("gpt_oss", "llama4")) else set()
    assert {key for key in values if again[key] != values[key]} <= written_only
    assert list(again) == list(values)


@pytest.mark.parametrize("preset", PRESETS)
def test_numbers_with_a_fraction_and_switches_of_text_are_refused_by_their_key(preset: str):
    values = values_of(preset)
    sizes = [key for key, value in values.items() if type(value) is int and ("hidden" in key or "heads" in key)]
    assert "hidden_size" in sizes
    for key, wrong in [*((size, 8.5) for size in sizes), ("tie_word_embeddings", "no")]:
        if preset == "deepseek_debug" and key == "num_key_value_heads":
            continue  # written for others, and equal to the heads
        with pytest.raises(UserError, match=rf"config\.json: (cannot use )?{key}\b"):
            from_huggingface({**values, key: wrong}, "strange")
