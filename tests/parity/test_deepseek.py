"""Promise 1 for DeepSeek, whose latents are replicated among tensor-parallel ranks: the same curve in every layout."""

from pathlib import Path

import pytest

from tests.parity.runs import LINES, assert_same_curve, remembered, train
from tests.parity.test_continued import assert_continues, continued
from tests.parity.test_quantized import assert_same_recipe

DEEPSEEK = "model=deepseek_debug optimizer.lr=1e-3"
"""At 2e-3 the norm of one step amplifies rounding a hundred times, in every layout."""
DENSE = f"{DEEPSEEK} model.dense_layers=4"
COMPILED = "compile=blocks compile.backend=aot_eager"
EXPERIMENTS = {
    "dense": DENSE,
    "documents": " ".join([DENSE, *LINES]),
    "lite": f"{DENSE} model.q_lora_rank=null",
    "experts": DEEPSEEK,
}


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return remembered(lambda: tmp_path_factory.mktemp("one"), EXPERIMENTS)


@pytest.mark.proves("deepseek", "layout")
@pytest.mark.parametrize(
    ("experiment", "layout"),
    [
        ("dense", "parallelism.tp=2"),
        ("dense", "parallelism.cp=2 parallelism.cp_method=ring"),
        ("lite", "parallelism.tp=2 parallelism.sequence_parallel=false"),
        ("documents", "parallelism.cp=2 parallelism.cp_method=allgather"),
        pytest.param(
            "documents", "parallelism.cp=2 parallelism.tp=2 parallelism.cp_method=ulysses", marks=pytest.mark.day
        ),
        pytest.param("dense", f"parallelism.tp=4 parallelism.dp_shard=2 {COMPILED}", marks=pytest.mark.night),
        ("lite", "parallelism.pp=2 parallelism.tp=2 parallelism.pp_schedule=ZBVZeroBubble"),
        ("lite", f"parallelism.cp=2 parallelism.tp=2 parallelism.cp_method=allgather {COMPILED}"),
        ("dense", "parallelism.cp=4 parallelism.cp_method=ring parallelism.cp_ulysses=2"),
        ("experts", "parallelism.dp_shard=2 training.micro_batch_size=2 activation_checkpoint=full"),
        ("experts", "parallelism.pp=2 parallelism.pp_schedule=Interleaved1F1B"),
        pytest.param("experts", "parallelism.cp=2", marks=pytest.mark.night),
        ("experts", f"parallelism.dp_shard=2 activation_checkpoint=selective {COMPILED}"),
        ("experts", "parallelism.tp=2 parallelism.ep=2"),
        pytest.param(
            "experts",
            "parallelism.dp_shard=2 parallelism.cp=2 parallelism.ep=4 parallelism.cp_method=ulysses",
            marks=pytest.mark.night,
        ),
    ],
)
def test_layout_does_not_change_the_curve(tmp_path: Path, one_device, experiment: str, layout: str):
    words = [*EXPERIMENTS[experiment].split(), *layout.split()]
    assert_same_curve(train(tmp_path / "many", *words), one_device(experiment))


@pytest.mark.proves("deepseek", "fp8")
@pytest.mark.night
@pytest.mark.parametrize("recipe", ["float8_tensorwise", "mxfp8"])
def test_quantized_latents_are_those_of_one_device(tmp_path: Path, recipe: str):
    """Scales of a replicated linear are those of all tensor-parallel ranks' tokens."""
    words = [*DENSE.split(), f"quantization={recipe}", "training.steps=3", "optimizer.lr=5e-4"]
    expected = train(tmp_path / "one", *words)
    assert_same_recipe(train(tmp_path / "many", *words, "parallelism.tp=2"), expected)


@pytest.mark.night
def test_resumes_in_another_layout(tmp_path: Path):
    whole, changed = continued(tmp_path, [*DENSE.split(), "parallelism.tp=2"], [*DENSE.split(), "parallelism.pp=2"])
    assert_continues(whole, changed)
