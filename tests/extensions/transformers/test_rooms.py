"""Classes of transformers in other rooms: given weights, repositories, conversion, damaged files, the planner."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.test_convert_verb import convert_command, refused
from tests.checkpoint.test_foreign_files import Reader, assert_read_or_refused
from tests.config.composing import experiment
from tests.models.round_trip import tensors
from tests.models.test_repository_fit import written
from tests.plan.test_plan_json import assert_predicted
from titan_exp.config.errors.user_error import UserError
from titan_exp.extensions.transformers.repository import config_size, repository_config
from titan_exp.models.convert.hf_config import repository_lines
from titan_exp.rules.weights import GivenWeights, model_misfits

transformers = pytest.importorskip("transformers")
OLMO = ("model=huggingface", "model.repository=docs/examples/olmo_debug")
SIZES = {"num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 9, "n_ctx": 4}


def test_a_class_of_transformers_is_compared_by_what_it_reads():
    model = experiment(*OLMO).model
    values: dict[str, Any] = model.config_json  # type: ignore[attr-defined]  # of this family

    def found(**keys: Any) -> list[str]:
        theirs = replace(model, config_json={**values, **keys})  # type: ignore[call-arg]
        return [one.field for one in model_misfits(model, GivenWeights("RUN", theirs))]

    assert found(transformers_version="4.1", use_cache=False, eos_token_id=3, initializer_range=0.5) == []
    assert found(attention_dropout=0.0) == [], "its default"
    assert found(attention_dropout=0.5) == []
    assert found(rms_norm_eps=0.5) == ["model.config_json.rms_norm_eps"]


def test_a_class_of_transformers_is_trained_by_another_model_and_others_are_refused():
    (line,) = repository_lines(written("gpt_neox"), "x")
    assert line.startswith("none of our families reads model_type 'gpt_neox'. They read deepseek_v3, ")
    assert line.endswith("transformers has its class: model=huggingface model.repository=FOLDER trains it.")
    for values in (written("gpt_neox"), {}):
        with pytest.raises(
            UserError, match=r"Our families read .*'llama'(.|\n)*no class for its model_type, 'unheard'"
        ):
            list(repository_lines({**values, "model_type": "unheard"}, "x"))


def test_a_class_of_transformers_is_converted_if_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = transformers.MistralConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                                        num_key_value_heads=2, intermediate_size=32)  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "mistral")
    mistral, ours, back = (str(tmp_path / name) for name in ("mistral", "ours", "back"))
    said = refused(mistral, ours)
    assert "none of our families reads model_type 'mistral'. They read deepseek_v3, " in said
    assert f"titan-exp convert {mistral} {ours} model=huggingface" in said
    assert not Path(ours).exists()
    assert convert_command([mistral, ours, "model=huggingface"]) == 0
    assert convert_command([ours, back]) == 0
    found, expected = tensors(Path(back)), tensors(Path(mistral))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_damaged_repository_is_read_or_refused(tmp_path: Path):
    def read(path: Path) -> None:
        values = repository_config(str(path.parent), {})
        for size in ("layers", "dim", "vocab_size", "context"):
            try:
                config_size(values, size)
            except ValueError as error:
                raise UserError(str(error)) from error

    assert_read_or_refused(Reader(SIZES, read, "config.json"), tmp_path, seed=len("repository"))


@pytest.mark.night
@pytest.mark.proves("huggingface", "plan")
def test_prediction_is_what_ranks_do(tmp_path: Path):
    assert_predicted(" ".join([*OLMO, "parallelism.dp_shard=2 parallelism.tp=2"]), tmp_path)
