"""Overrides of a resolved configuration compose it again, and are few."""

import pytest

from titan_exp.config.hydra.compose import compose
from titan_exp.config.hydra.nondefault import model_overrides, nondefault_overrides
from titan_exp.config.schema.typed_config import to_dict, to_experiment

SAME = (
    ("model=llama3_8b", "optimizer=sgd", "lr_schedule=cosine", "training.steps=100", "optimizer.lr=0.3"),
    ("quantization=float8_rowwise", "cluster=slurm_h100", "parallelism.tp=2", "lr_schedule.decay_steps=7"),
    ("model.heads=12", "model.kv_heads=12", "optimizer.name=torch.optim.NAdam", "+optimizer.options.rho=0.1"),
    ("parallelism=ddp", "compile=blocks", "checkpoint=sync", "parallelism.dp_replicate=4", "+cluster.partition=x"),
    ("data=text", "experiment.tags=[a,'b c']", "experiment.notes='it is: a, test!'", "data.paths=['a b/*.txt',x]"),
    ("data=text", "data.paths=[a]", "data.validation_fraction=0.0"),
    ("experiment.name='1e3'", "experiment.notes='null'", "training.micro_batch_size=1", "training.max_grad_norm=null"),
    (r"experiment.notes='a=b \'c\' \n \\\' \\ {d} #e\\'", "optimizer.betas=[0.9,0.99]", "checkpoint.continue_from=a/b"),
)


@pytest.mark.parametrize("overrides", [(), *SAME], ids=lambda words: " ".join(words) or "none")
def test_typed_overrides_are_found_again(overrides: tuple[str, ...]):
    wanted = to_experiment(compose(overrides))
    found = nondefault_overrides(to_dict(wanted))
    assert sorted(found) == sorted(overrides)
    assert to_experiment(compose(found)) == wanted


@pytest.mark.parametrize("overlay", ["smoke", "llama3_8b_c4", "llama3_8b_one_gpu"])
def test_an_overlay_is_spelled_out(overlay: str):
    wanted = to_experiment(compose([f"+experiment={overlay}"]))
    found = nondefault_overrides(to_dict(wanted))
    assert to_experiment(compose(found)) == wanted
    assert f"experiment.name={overlay}" in found


def test_a_key_that_follows_from_another_is_not_listed():
    wanted = to_experiment(compose(["training.steps=200", "model.dim=384"]))
    assert wanted.lr_schedule.warmup_steps == 10
    assert nondefault_overrides(to_dict(wanted)) == ["training.steps=200", "model.dim=384"]
    values = to_dict(wanted)
    values["lr_schedule"]["warmup_steps"] = 11
    found = nondefault_overrides(values)
    # The decay follows from warm-up as well.
    assert found == ["training.steps=200", "model.dim=384", "lr_schedule.warmup_steps=11"]


def test_a_key_without_effect_is_not_listed():
    values = to_dict(to_experiment(compose()))
    values["quantization"]["smallest_gemm"] = 7
    assert nondefault_overrides(values) == []
    values["quantization"]["recipe"] = "float8_rowwise"
    assert nondefault_overrides(values) == ["quantization=float8_rowwise", "quantization.smallest_gemm=7"]


def test_values_of_a_foreign_folder_are_not_resolved(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_OF_MINE", "64")
    values = to_dict(to_experiment(compose()))
    values["model"] |= {"dim": "${oc.env:SECRET_OF_MINE}", "name": "${oc.create:[1]}", "architecture": "no.such.module"}
    values["unknown"] = {"key": "${oc.env:SECRET_OF_MINE}"}
    found = nondefault_overrides(values)
    assert "model.dim='${oc.env:SECRET_OF_MINE}'" in found
    assert "model.architecture=no.such.module" in found
    assert "+unknown.key='${oc.env:SECRET_OF_MINE}'" in found
    assert not any("64" in override for override in found)


def test_an_ablation_of_a_preset_names_the_nearest_one():
    model = to_experiment(compose(["model=qwen3_4b", "model.layers=3"])).model
    assert model_overrides(model) == ["model=qwen3_4b", "model.layers=3"]
