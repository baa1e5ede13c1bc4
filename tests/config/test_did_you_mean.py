import pytest

from titan_exp.config.errors.user_error import (
    Violation,
    did_you_mean,
    divisors,
    listed,
    multiples_near,
    nearest,
    nearest_numbers,
    shown,
)
from titan_exp.config.schema.schema import meaning_of, value_keys

MODELS = ["llama2_7b", "llama3_1_8b", "llama3_8b", "llama3_70b", "llama_debug"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("training.stesp", "training.steps"),
        ("training.stepz", "training.steps"),
        ("traning.steps", "training.steps"),
        ("lr", "optimizer.lr"),
        ("model.lr", "optimizer.lr"),
        ("seed", "experiment.seed"),
        ("TRAINING.STEPS", "training.steps"),
        ("max_steps", "training.steps"),
        ("global_batch", "training.global_batch_size"),
        ("data.path", "data.paths"),
        ("optimizer.beta", "optimizer.betas"),
        ("tp", "parallelism.tp"),
    ],
)
def test_the_key_that_was_meant_comes_first(typed: str, meant: str):
    assert nearest(typed, value_keys())[0] == meant


def test_far_words_are_not_offered():
    assert nearest("parallelism.fsdp", value_keys()) == []
    assert nearest("zzz", MODELS) == []
    assert did_you_mean("zzz", MODELS) == ""


def test_options_that_begin_with_the_word_are_offered():
    assert nearest("llama3", MODELS) == ["llama3_8b", "llama3_70b", "llama3_1_8b"]
    assert did_you_mean("llama_debgu", MODELS) == "did you mean llama_debug?"


def test_numbers():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(1) == [1]
    assert divisors(49) == [1, 7, 49]
    assert nearest_numbers(5, divisors(12)) == [3, 4, 6]
    assert multiples_near(10, 4) == [8, 12]
    assert multiples_near(2, 4) == [4]


def test_lists_read_as_a_sentence():
    assert [listed([]), listed([1]), listed([1, 2]), listed([1, 2, 3], "and")] == ["", "1", "1 or 2", "1, 2 and 3"]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "null"), (True, "true"), (("a", 1), "[a,1]"), ({"a": None}, "{a:null}"), (0.1, "0.1")]
)
def test_values_are_shown_as_they_are_typed(value: object, text: str):
    assert shown(value) == text
    assert str(Violation("data.paths", value, "why", "what")) == f"data.paths={text}: why\n    what"


def test_every_key_has_a_meaning():
    assert [key for key in value_keys() if not meaning_of(key)] == []
