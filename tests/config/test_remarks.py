"""A typed override without effect is named, with the key that leaves it so; and a forgotten tokenizer."""

import pytest

from titan_exp.config.command_line.help import remarks
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment


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
        (["model=llama3_1_70b", "data=c4"], "uses 257 of the model's 128,256 tokens"),
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
