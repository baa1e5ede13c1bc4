"""A model family is described in one file: the rest of the product reads its spec."""

import re
from dataclasses import fields, replace
from pathlib import Path

import titan_exp
from tests.config.composing import experiment
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.config.schema.component import builtin_components, config_classes
from titan_exp.models.spec.lookup import model_spec

PACKAGE = Path(titan_exp.__file__).parent
COMMON = {field.name for field in fields(ModelConfig)} | {"attention_backend", "linear_attention_backend", "repository"}
"""Fields of every model; the kernels, keys of every model with attention; and a word that git has too."""


def sources() -> dict[str, str]:
    rooms = ("models", "extensions")
    files = (path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in rooms)
    return {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in files}


def test_few_files_name_a_field_of_a_family():
    own = {field.name for kind in config_classes("model") for field in fields(kind)} - COMMON
    assert {"heads", "ffn_dim", "rope"} < own
    word = "|".join(sorted(own))
    named = re.compile(rf"\bmodel\.({word})\b|[\"']({word})[\"']")
    found = [name for name, text in sources().items() if named.search(text)]
    # The check of layouts has the sizes of small models, of classes of transformers as well.
    assert len(found) <= 6, found


def test_nothing_asks_for_the_name_of_an_architecture():
    asked = re.compile(r"architecture\s*(==|!=)\s*[\"']|architecture\s+(not\s+)?in\b")
    assert [name for name, text in sources().items() if asked.search(text)] == []


def test_a_family_is_one_short_file():
    assert set(builtin_components("model")) >= {"llama", "qwen3"}
    for name, module in builtin_components("model").items():
        lines = (PACKAGE.parent / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 250, name


def test_a_spec_says_what_is_computed_per_sequence():
    by_family = {
        "llama_debug": False,
        "qwen3_moe_debug": False,
        "qwen3_moe_debug model.moe.balance.loss=sequence model.moe.balance.coefficient=0.01": True,
        "deepseek_debug model.moe.balance.coefficient=0": False,
        "deepseek_debug model.moe.balance.coefficient=0 model.mtp.depth=1": True,
    }
    specs = {words: model_spec(experiment(*f"model={words}".split()).model) for words in by_family}
    assert {words: spec and spec.computes_per_sequence for words, spec in specs.items()} == by_family
    plain = specs["llama_debug"]
    assert plain is not None
    assert replace(plain, per_sequence=True).computes_per_sequence
