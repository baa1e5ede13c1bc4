"""Promise 1 for OLMo 2, whose QK norms are over the heads of all tensor-parallel ranks: one curve in every layout."""

from pathlib import Path

import pytest

from tests.parity.runs import LINES, assert_same_curve, remembered, train
from tests.parity.test_continued import assert_continues, continued
from tests.parity.test_quantized import assert_same_recipe

OLMO2 = "model=olmo2_debug"
EXPERIMENTS = {
    "plain": OLMO2,
    "documents": " ".join([OLMO2, *LINES]),
    "completep": f"{OLMO2} parametrization=completep parametrization.base_width=32 parametrization.base_depth=2",
}
WHOLE = "parallelism.sequence_parallel=false"


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return remembered(lambda: tmp_path_factory.mktemp("one"), EXPERIMENTS)


@pytest.mark.proves("olmo2", "layout")
@pytest.mark.parametrize(
    ("experiment", "layout"),
    [
        pytest.param("plain", "parallelism.tp=2", marks=pytest.mark.day),
        ("plain", f"parallelism.tp=2 {WHOLE}"),
        ("plain", "parallelism.dp_shard=2 training.micro_batch_size=2 activation_checkpoint=full"),
        ("plain", "parallelism.cp=2"),
        ("documents", "parallelism.cp=4 parallelism.cp_method=allgather"),
        ("plain", "parallelism.pp=2 parallelism.pp_schedule=Interleaved1F1B"),
        # More ranks than key and value heads, in which two ranks normalize one key head.
        pytest.param("documents", f"parallelism.tp=4 {WHOLE}", marks=pytest.mark.day),
        ("plain", "parallelism.tp=4"),
        # Weights of the norms are sharded over data ranks too, or not at all where these do not divide 12 numbers.
        ("plain", "parallelism.tp=2 parallelism.dp_shard=2 compile=blocks compile.backend=aot_eager"),
        ("plain", "parallelism.tp=2 parallelism.dp_shard=4 model.head_dim=6"),
        ("plain", "parallelism.tp=2 activation_checkpoint=selective"),
        ("plain", "parallelism.pp=2 parallelism.tp=2 parallelism.pp_schedule=ZBVZeroBubble"),
        ("documents", "parallelism.cp=2 parallelism.tp=2 parallelism.cp_method=ulysses model.kv_heads=4"),
        ("completep", "parallelism.tp=2"),
    ],
)
def test_layout_does_not_change_the_curve(tmp_path: Path, one_device, experiment: str, layout: str):
    words = [*EXPERIMENTS[experiment].split(), *layout.split()]
    more = [word for word in words if word.startswith(("model.kv_heads", "model.head_dim"))]
    expected = train(tmp_path / "one", *EXPERIMENTS[experiment].split(), *more) if more else one_device(experiment)
    assert_same_curve(train(tmp_path / "many", *words), expected)


@pytest.mark.night
@pytest.mark.proves("olmo2", "fp8")
@pytest.mark.parametrize("recipe", ["float8_rowwise", "mxfp8"])
def test_quantized_linears_are_those_of_one_device(tmp_path: Path, recipe: str):
    words = [OLMO2, f"quantization={recipe}", "training.steps=2", "optimizer.lr=5e-4"]
    expected = train(tmp_path / "one", *words)
    many = train(tmp_path / "many", *words, "parallelism.tp=2", "parallelism.dp_shard=2")
    # Gradients of the last layer are equal. A norm divides by what a branch adds, which is small at first: flips grow
    # from layer to layer, to 9e-4 of the norm.
    assert_same_recipe(many, expected, first_norm=2e-3)


@pytest.mark.night
def test_resumes_in_another_layout(tmp_path: Path):
    whole, changed = continued(tmp_path, [OLMO2, "parallelism.tp=2"], [OLMO2, "parallelism.pp=2"])
    assert_continues(whole, changed)
