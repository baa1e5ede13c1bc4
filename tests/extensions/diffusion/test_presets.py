"""Presets of FLUX.1: numbers of parameters, compared fields, and no remark about a tokenizer."""

import pytest

from tests.config.composing import experiment
from tests.config.test_given_weights import test_every_field_is_compared_unless_it_says_otherwise as compare_fields
from tests.config.test_models import parameters
from titan_exp.config.command_line.help import remarks
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.models.spec.lookup import model_spec

PUBLISHED = {"flux_dev": 11_901_408_320, "flux_schnell": 11_891_178_560}


@pytest.mark.counts("total")
@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameter_count(name: str, count: int):
    assert parameters(name) == count


@pytest.mark.counts("active")
@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_active_parameters(name: str, count: int):
    spec = model_spec(experiment(f"model={name}").model)
    assert spec is not None
    assert spec.active_parameters == count


def test_every_field_is_compared():
    compare_fields("flux_debug")


def test_no_tokenizer_is_missed():
    typed = ["model=flux_debug", "data=images"]
    assert list(remarks(typed, to_experiment(compose(typed)))) == []
