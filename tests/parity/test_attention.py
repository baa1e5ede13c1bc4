"""Promise 1 for windows, chunks, sinks, biases and query temperature: the same curve in every layout."""

from pathlib import Path

import pytest

from tests.parity.runs import LINES, assert_same_curve, remembered, train
from tests.parity.test_quantized import assert_same_recipe

MIXED = (
    "model.architecture=tests.models.own_attention +model.window=11 +model.chunk=24 model.layers=4 optimizer.lr=1e-3"
)
"""Four kinds of attention in one model, all of them shorter than the 64 tokens of a sequence."""
EXPERIMENTS = {
    "mixed": MIXED,
    "documents": " ".join([MIXED, *LINES]),
    # Windows and chunks so long that parts of them need no mask, but for documents.
    "long documents": " ".join([MIXED.replace("window=11", "window=48").replace("chunk=24", "chunk=48"), *LINES]),
    "positions restart": " ".join([MIXED, *LINES, "data.document_mask=false"]),
    "one kv head": f"{MIXED} model.kv_heads=1",
}
COMPILED = "compile=blocks compile.backend=aot_eager"


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return remembered(lambda: tmp_path_factory.mktemp("one"), EXPERIMENTS)


@pytest.mark.parametrize(
    ("experiment", "layout"),
    [
        ("mixed", "parallelism.tp=2"),
        pytest.param("mixed", "parallelism.cp=2 parallelism.cp_method=ring", marks=pytest.mark.day),
        ("documents", "parallelism.cp=2 parallelism.cp_method=allgather"),
        ("positions restart", "parallelism.cp=2 parallelism.cp_method=ulysses"),
        pytest.param("long documents", "parallelism.cp=2 parallelism.cp_method=ring", marks=pytest.mark.night),
        pytest.param("documents", "parallelism.cp=2 parallelism.cp_method=ring", marks=pytest.mark.night),
        pytest.param("mixed", "parallelism.cp=4 parallelism.cp_method=ring", marks=pytest.mark.night),
        pytest.param("mixed", "parallelism.tp=2 parallelism.sequence_parallel=false", marks=pytest.mark.night),
        pytest.param("one kv head", "parallelism.tp=2", marks=pytest.mark.night),
        pytest.param("mixed", "parallelism.cp=4 parallelism.cp_method=ring parallelism.cp_ulysses=2",
                     marks=pytest.mark.night),
        pytest.param("mixed", f"parallelism.cp=2 parallelism.tp=2 {COMPILED}", marks=pytest.mark.night),
        pytest.param("documents", f"parallelism.dp_shard=2 {COMPILED} activation_checkpoint=full",
                     marks=pytest.mark.night),
        pytest.param("documents", "parallelism.pp=2 parallelism.tp=2 parallelism.pp_schedule=ZBVZeroBubble",
                     marks=pytest.mark.night),
        pytest.param("mixed", "parallelism.pp=2 parallelism.cp=2 parallelism.dp_shard=2", marks=pytest.mark.night),
    ],
)  # fmt: skip
def test_layout_does_not_change_the_curve(tmp_path: Path, one_device, experiment: str, layout: str):
    found = train(tmp_path / "many", *EXPERIMENTS[experiment].split(), *layout.split())
    assert_same_curve(found, one_device(experiment))


@pytest.mark.night
def test_quantized_linears_with_bias_are_those_of_one_device(tmp_path: Path):
    words = [*MIXED.split(), "quantization=float8_rowwise", "quantization.smallest_gemm=0", "training.steps=3"]
    expected = train(tmp_path / "one", *words)
    assert_same_recipe(train(tmp_path / "many", *words, "parallelism.tp=2"), expected)
