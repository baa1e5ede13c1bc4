"""A user's own model with experts, through the whole trainer: sharded, replicated, recomputed and compiled, it is the
curve of one device, without a recipe and with one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.parity.runs import Curve, assert_same_curve, remembered, train
from tests.parity.test_quantized import assert_same_recipe
from titan_exp.checkpoint.formats.open_checkpoint import open_checkpoint
from titan_exp.trainer.restore import load_source

EXPERTS = "model.architecture=tests.models.own_experts.Mixture training.steps=3 optimizer.lr=5e-4"
RUNS = {
    "none": EXPERTS,
    "rowwise": f"{EXPERTS} quantization=float8_rowwise",
    "mx": f"{EXPERTS} quantization=mxfp8",
}


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Curve]:
    return remembered(lambda: tmp_path_factory.mktemp("one"), RUNS)


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        pytest.param("none", "parallelism.dp_shard=2 activation_checkpoint=full", marks=pytest.mark.day),
        ("rowwise", "parallelism.dp_shard=2 compile=blocks compile.backend=aot_eager"),
        ("mx", "parallelism=ddp activation_checkpoint=selective"),
    ],
)
def test_layout_does_not_change_the_curve(tmp_path: Path, one_device, recipe: str, layout: str):
    found = train(tmp_path, *RUNS[recipe].split(), *layout.split())
    (assert_same_curve if recipe == "none" else assert_same_recipe)(found, one_device(recipe))
    assert found.weights["blocks.0.experts.down.weight"].dim() == 3
    assert recipe == "none" or one_device(recipe).grad_norm != one_device("none").grad_norm


def test_stacked_weights_are_loaded_from_a_run(tmp_path: Path):
    saving = ["checkpoint.mode=sync", "checkpoint.every=2"]
    trained = train(tmp_path, *EXPERTS.split(), "training.steps=2", "parallelism.dp_shard=2", *saving)
    loaded = load_source(open_checkpoint(tmp_path, trust=True), torch.device("cpu"), seq_len=64).state_dict()
    assert loaded.keys() == trained.weights.keys()
    for name, weight in trained.weights.items():
        assert torch.equal(loaded[name], weight), name
