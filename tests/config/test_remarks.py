"""A typed override without effect is named, with the key that leaves it so; a forgotten tokenizer or rate, too."""

import pytest

from titan_exp.config.command_line.help import remarks
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.launch.run_plan import LAPTOP_PARAMETERS, LAPTOP_WIDTH, laptop_rate
from titan_exp.models.spec.lookup import model_spec


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["activation_checkpoint.every=3"], "activation_checkpoint.mode=none"),
        (["activation_checkpoint=full", "activation_checkpoint.save=[aten.mm]"], "activation_checkpoint.mode=full"),
        (["activation_checkpoint=every_n", "activation_checkpoint.every=3"], None),
        (["activation_checkpoint.mode=none"], None),
        (["quantization.smallest_gemm=7"], "quantization.recipe=none"),
        (["quantization.recipe=none", "quantization=none"], None),
        (["parallelism.pp_schedule=gpipe"], "parallelism.pp=1"),
        (["parallelism.pp_schedule=gpipe", "parallelism.pp=2"], None),
        (["compile=none", "compile.backend=aot_eager"], "compile.enabled=false"),
        (["training.steps=3", "model=llama_debug"], None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_idle_override_is_named(typed: list[str], said: str | None):
    found = list(remarks(typed, to_experiment(compose(typed))))
    assert found == ([] if said is None else [f"{typed[-1]} has no effect with {said}"])


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["model=llama3_1_70b", "data=c4"], "uses only 257 of the model's 128,256 tokens"),
        (["model=llama3_1_70b", "data=c4", "data.tokenizer=bytes"], None),
        (["model=llama3_1_70b", "data=c4", "data.tokenizer=llama3"], None),
        (["model=llama3_1_70b", "data=tokens"], None),
        (["model=llama_debug", "data=c4"], None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_forgotten_tokenizer_is_said(typed: list[str], said: str | None):
    found = list(remarks(typed, to_experiment(compose(typed))))
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["cluster=slurm_h100"], True),
        (["cluster=slurm_h100", "training.mixed_precision=fp32"], False),
        (["cluster=slurm_h100", "training.mixed_precision=bf16"], False),
        (["cluster.device=cpu"], False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_fp32_on_gpus_by_default_is_said(typed: list[str], said: bool):
    found = list(remarks(typed, to_experiment(compose(typed))))
    assert len(found) == said
    assert not said or "Use training.mixed_precision=bf16, or" in found[0]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["model=llama3_1_70b"], "optimizer.lr=9e-05"),
        (["model=llama3_1_70b", "optimizer=muon"], "optimizer.lr=9e-05"),
        (["model=llama3_1_70b", "optimizer.lr=0.004"], None),
        (["model=llama3_1_70b", "optimizer.lr=1.5e-4"], None),
        (["model=llama3_1_70b", "optimizer=adamw", "parametrization=mup"], None),
        (["+experiment=llama3_8b_c4"], None),
        (["model=llama_laptop"], None),
        (["model=llama_debug"], None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_learning_rate_of_a_small_model_is_said(typed: list[str], said: str | None):
    found = list(laptop_rate(typed, to_experiment(compose(typed))))
    assert len(found) == (said is not None)
    if said is not None:
        assert "optimizer.lr=0.004 is the default, made for model=llama_laptop; this model has 41,564 times" in found[0]
        assert said in found[0]
        assert "lr_schedule.warmup_steps=50" in found[0]
        assert list(laptop_rate([*typed, said], to_experiment(compose([*typed, said])))) == []


def test_the_small_model_is_the_laptop_preset():
    spec = model_spec(to_experiment(compose(["model=llama_laptop"])).model)
    assert spec is not None
    assert (spec.parameters, spec.dim) == (LAPTOP_PARAMETERS, LAPTOP_WIDTH)
