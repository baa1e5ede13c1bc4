import copy
import dataclasses
import json
from contextlib import suppress
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.config.composing import experiment, refused
from titan_exp.config.errors.explain_values import about
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.optimizer import AdamWConfig
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.schema import annotation_of, is_list, is_number, value_keys
from titan_exp.config.schema.typed_config import load_experiment, readable_part, to_dict, to_experiment, to_yaml
from titan_exp.rules import violations


def test_values_become_the_fields_types():
    run = experiment(
        "training.steps=1e6",
        "optimizer.lr=1",
        "experiment.name=2024",
        "experiment.tags=[1,tp]",
        "+data.options.depth=3",
    )
    assert (run.training.steps, type(run.training.steps)) == (1_000_000, int)
    assert (run.optimizer.lr, type(run.optimizer.lr)) == (1.0, float)
    assert run.experiment.name == "2024"
    assert run.experiment.tags == ("1", "tp")
    assert isinstance(run.optimizer, AdamWConfig)
    assert run.optimizer.betas == (0.9, 0.95)
    assert run.data.options == {"depth": 3}
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.training.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "override",
    [
        "training.steps=1.5",
        "training.steps=abc",
        "training.steps=true",
        "training.seq_len=0",
        "training.steps=null",
        "training.micro_batch_size=true",
        "training.max_grad_norm=inf",
        "training.max_grad_norm=nan",
        "training.mixed_precision=fp16",
        "training.deterministic=maybe",
        "evaluation.every=-1",
        "parallelism.dp_shard=0",
        "parallelism.dp_shard=-2",
        "parallelism.reshard_after_forward=true",
        "optimizer.lr=0",
        "optimizer.lr=fast",
        "optimizer.betas=[0.9]",
        "optimizer.betas=[0.9,0.95,0.99]",
        "optimizer.betas=[0.9,1.0]",
        "optimizer.options=3",
        "lr_schedule.min_lr_ratio=1.1",
        "model.rope=3",
        "model.rope.theta=-1",
        "data.paths=notes.txt",
        "data.validation_fraction=1",
        "checkpoint.mode=asynch",
        "experiment.name=null",
        "experiment.notes={a:1}",
        "cluster.device=gpu",
    ],
)
def test_a_wrong_value_names_its_field(override: str):
    (violation,) = refused(override)
    assert violation.field == override.partition("=")[0]
    assert violation.reason
    assert violation.remedy


def test_all_errors_come_at_once_in_the_order_of_the_configuration():
    wrong = (
        "training.seq_len=0",
        "+model.depth=3",
        "checkpoint.mode=asynch",
        "~data.split",
        "+foo.bar=1",
        "optimizer.lr=-1",
    )
    fields = [violation.field for violation in refused(*wrong)]
    assert fields == ["training.seq_len", "optimizer.lr", "data.split", "checkpoint.mode", "foo", "model.depth"]


def test_attributes_that_a_class_derives_are_no_fields():
    words = ["model=llama_debug", "model.architecture=tests.models.own_derived", "training.steps=many"]
    found, run = readable_part(compose(words))
    assert [violation.field for violation in found] == ["training.steps"]
    assert run.model.half * 2 == run.model.dim  # type: ignore[attr-defined]  # of its class


def test_remedies_name_what_would_work():
    by_field = {
        violation.field: violation
        for violation in refused(
            "training.steps=2.6",
            "training.mixed_precision=bf32",
            "parallelism.dp_shard=0",
            "data.paths=notes.txt",
            "optimizer.lr=-1",
            "+model.layer=3",
        )
    }
    assert "training.steps=3" in by_field["training.steps"].remedy
    assert "bf16" in by_field["training.mixed_precision"].remedy
    assert by_field["parallelism.dp_shard"].reason == "must be -1 or at least 1"
    assert "data.paths='[notes.txt]'" in by_field["data.paths"].remedy
    assert "Peak learning rate" in by_field["optimizer.lr"].remedy
    assert "model.layers" in by_field["model.layer"].remedy


@pytest.mark.parametrize(
    ("words", "says", "others"),
    [
        ("optimizer=lion optimizer.state_precision=int8", "fp32 or bf16", "fp8"),
        ("optimizer=dion optimizer.scale=orig", "match_rms_adamw, original and none", ""),
        ("optimizer=soap optimizer.split_feed_forward=head", "fused or projection", "head"),
        ("optimizer=schedule_free_adamw optimizer.betas=[0.9]", "share of the averaged weights", "of AdamW's"),
        ("optimizer=lion optimizer.betas=[0.9]", "Share of the momentum", "of AdamW's"),
    ],
)
def test_remedies_are_those_of_the_chosen_option(words: str, says: str, others: str):
    """Optimizers have keys of one name and different values."""
    (violation,) = refused(*words.split())
    assert says in violation.remedy
    assert not others or others not in violation.remedy


def test_values_computed_from_a_wrong_value_are_not_reported():
    (violation,) = refused("training.steps=abc")
    assert violation.field == "training.steps"


def test_an_interpolation_that_fails_names_the_keys_it_reads():
    (violation,) = refused("model.heads=5")
    assert violation.field == "model.head_dim"
    assert "5 does not divide 192 (nearest: 4 or 6)" in violation.reason
    assert "model.dim or model.heads" in violation.remedy


def test_interpolations_that_read_each_other_are_both_named():
    circle = refused("lr_schedule.warmup_steps=${.decay_steps}", "lr_schedule.decay_steps=${.warmup_steps}")
    assert [violation.field for violation in circle] == ["lr_schedule.warmup_steps", "lr_schedule.decay_steps"]


def test_a_value_that_is_still_missing_is_named():
    (violation,) = refused("training.steps=???", "lr_schedule.warmup_steps=1", "lr_schedule.decay_steps=1")
    assert violation.field == "training.steps"
    assert "training.steps=" in violation.remedy


@pytest.mark.parametrize(
    "overrides",
    [(), ("experiment.notes='ünïcode: \"x\" #y'", "+optimizer.options.a=[1,{b:null}]", "optimizer.lr=1e-9")],
)
def test_yaml_reads_back_equal(tmp_path: Path, overrides: tuple[str, ...]):
    run = experiment(*overrides)
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(run), encoding="utf-8")
    assert load_experiment(path) == run
    assert json.loads(json.dumps(to_dict(run))) == to_dict(run)
    assert "${" not in to_yaml(run)


@pytest.mark.parametrize(
    ("override", "field", "says"),
    [
        ("model.architecture=lama", "model.architecture", "did you mean llama"),
        ("model.architecture=mamba", "model.architecture", "Built in are deepseek, "),
        ("model.architecture=mamba", "model.architecture", "model.architecture=my_package.my_model"),
        ("model.architecture=tests.models.own_model.Bigam", "model.architecture", "did you mean Bigram?"),
        ("model.architecture=tests.models.own_model", "model.architecture", "define Config, spec and block there"),
        ("model.architecture=nowhere.my_model", "model.architecture", "PYTHONPATH"),
        ("+model.options.a=1", "model.options", "model has name, architecture"),
        ("+model.head_dims=8", "model.head_dims", "did you mean model.head_dim?"),
    ],
)
def test_an_architecture_has_its_own_keys(override: str, field: str, says: str):
    (violation,) = refused(override)
    assert violation.field == field
    assert says in violation.remedy


def test_a_plain_class_takes_options():
    run = experiment("model.architecture=tests.models.own_model.Bigram", "+model.options={scale:2.0}")
    assert vars(run.model)["options"] == {"scale": 2.0}


def test_the_former_name_of_an_architecture_still_reads(tmp_path: Path):
    run = experiment()
    old = to_dict(run)
    old["model"] |= {"architecture": "decoder", "options": {}}
    (tmp_path / "config.yaml").write_text(json.dumps(old), encoding="utf-8")
    assert load_experiment(tmp_path / "config.yaml") == run


def test_configuration_composed_from_a_run_file_is_equal(tmp_path: Path):
    run = experiment("model=llama_debug", "optimizer.lr=1e-9")
    (tmp_path / "config.yaml").write_text(to_yaml(run))
    from omegaconf import OmegaConf

    assert to_experiment(OmegaConf.load(tmp_path / "config.yaml")) == run  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "no such file"),
        ("a: [", "not YAML"),
        ("3", "the single value 3 instead of a configuration"),
        ("training: {steps: 3}", "experiment: this group"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str | None, says: str):
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=says):
        load_experiment(path)


def test_hydras_own_node_is_left_out():
    cfg = compose()
    cfg = type(cfg)({**cfg, "hydra": {"verbose": True}})
    assert to_experiment(cfg) == experiment()


def test_every_key_of_a_number_or_a_list_has_an_example():
    """It is the value to type for one that cannot be read."""
    keys = [key for key in value_keys() if is_number(annotation_of(key)) or is_list(annotation_of(key))]
    assert len(keys) > 100
    assert [key for key in keys if not about(key, "").startswith(("for example ", "for example +"))] == []


TEXTS = [key for key in value_keys() if annotation_of(key) in (str, str | None)]


@pytest.mark.parametrize("value", [["a", "b"], {"a": 1}, [], {}, 7, 0.5, True, None, "", "no such name", "a.b"])
def test_a_text_of_another_type_is_a_refusal(value: object):
    """Names of optimizers, families, sources, paths: whatever is typed, no traceback follows."""
    assert len(TEXTS) > 30
    cfg = compose(["model=llama_debug"])
    for key in TEXTS:
        if OmegaConf.select(cfg, key.rpartition(".")[0]) is None:
            continue  # of another option
        changed = copy.deepcopy(cfg)
        OmegaConf.update(changed, key, value, merge=False, force_add=True)
        try:
            with suppress(UserError):
                violations(to_experiment(changed))
        except Exception as error:
            raise AssertionError(f"{key}={value!r}") from error


@pytest.mark.parametrize("key", ["optimizer.name", "model.architecture", "parametrization.name"])
@pytest.mark.parametrize("value", ["[a,b]", "{a:1}", "true"])
def test_a_component_that_is_no_text_is_the_one_violation(key: str, value: str):
    (found,) = refused("model=llama_debug", f"{key}={value}")
    assert (found.field, found.reason) == (key, "it must be text")
