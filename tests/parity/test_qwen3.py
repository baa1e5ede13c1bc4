"""Promise 1 for Qwen3, whose QK norms see only a tensor-parallel rank's heads: the same curve in every layout."""

from pathlib import Path

import pytest

from tests.parity.runs import LINES, assert_same_curve, remembered, train
from tests.parity.test_continued import assert_continues, continued
from tests.parity.test_quantized import assert_same_recipe

QWEN3 = "model=qwen3_debug"
EXPERIMENTS = {"plain": QWEN3, "documents": " ".join([QWEN3, *LINES]), "untied": f"{QWEN3} model.tied_embeddings=false"}


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return remembered(lambda: tmp_path_factory.mktemp("one"), EXPERIMENTS)


@pytest.mark.proves("qwen3", "layout")
@pytest.mark.parametrize(
    ("experiment", "layout"),
    [
        ("plain", "parallelism.dp_shard=2 training.micro_batch_size=2 activation_checkpoint=full"),
        ("plain", "parallelism.tp=2"),
        ("plain", "parallelism.cp=2"),
        ("documents", "parallelism.cp=4 parallelism.cp_method=allgather"),
        ("plain", "parallelism.pp=2 parallelism.pp_schedule=Interleaved1F1B"),
        # More ranks than key and value heads, every token on each.
        ("documents", "parallelism.tp=4 parallelism.sequence_parallel=false"),
        ("untied", "parallelism.tp=2 parallelism.dp_shard=2 compile=blocks compile.backend=aot_eager"),
        ("untied", "parallelism.pp=2 parallelism.tp=2 parallelism.pp_schedule=ZBVZeroBubble"),
        ("documents", "parallelism.cp=2 parallelism.tp=2 parallelism.cp_method=ulysses model.kv_heads=4"),
    ],
)
def test_layout_does_not_change_the_curve(tmp_path: Path, one_device, experiment: str, layout: str):
    words = [*EXPERIMENTS[experiment].split(), *layout.split()]
    if "kv_heads" in layout:
        expected = train(tmp_path / "one", *EXPERIMENTS[experiment].split(), "model.kv_heads=4")
    else:
        expected = one_device(experiment)
    assert_same_curve(train(tmp_path / "many", *words), expected)


@pytest.mark.night
@pytest.mark.proves("qwen3", "fp8")
@pytest.mark.parametrize("recipe", ["float8_rowwise", "mxfp8"])
def test_quantized_linears_are_those_of_one_device(tmp_path: Path, recipe: str):
    words = [QWEN3, f"quantization={recipe}", "training.steps=3", "optimizer.lr=5e-4"]
    expected = train(tmp_path / "one", *words)
    assert_same_recipe(train(tmp_path / "many", *words, "parallelism.tp=2", "parallelism.dp_shard=2"), expected)


@pytest.mark.night
def test_resumes_in_another_layout(tmp_path: Path):
    whole, changed = continued(tmp_path, [QWEN3, "parallelism.tp=2"], [QWEN3, "parallelism.pp=2"])
    assert_continues(whole, changed)
