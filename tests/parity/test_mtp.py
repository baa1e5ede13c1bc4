"""Promise 1 for multi-token prediction: modules on the last stage, with a copy of the embedding, in every layout."""

from pathlib import Path

import pytest

from tests.parity.runs import EVALUATE, LINES, PARAGRAPHS, assert_same_curve, remembered, train
from tests.parity.test_continued import assert_continues, continued
from tests.parity.test_quantized import assert_same_recipe

MTP = "model=deepseek_debug optimizer.lr=1e-3 model.mtp.depth=1"
COMPILED = "compile=blocks compile.backend=aot_eager"
EXPERIMENTS = {
    "v3": MTP,
    "documents": " ".join([MTP, *LINES]),
    "deep": f"{MTP} model.mtp.depth=2 training.steps=5",
}
DAY = [
    ("documents", "parallelism.pp=2 parallelism.pp_schedule=ZBVZeroBubble"),
]
"""Experiments and layouts of every test run."""
NIGHT = [
    ("documents", "parallelism.cp=2 training.micro_batch_size=2"),
    ("v3", "training.micro_batch_size=2 activation_checkpoint=full"),
    ("v3", "parallelism.tp=2 parallelism.ep=2 training.loss_chunk_tokens=37"),
    ("v3", "parallelism.tp=2 parallelism.sequence_parallel=false"),
    ("v3", "parallelism.tp=2 parallelism.loss_parallel=false parallelism.dp_shard=2"),
    ("v3", "parallelism.cp=2 parallelism.cp_method=ring"),
    ("v3", "parallelism.cp=2 parallelism.cp_method=allgather parallelism.tp=2"),
    ("documents", "parallelism.cp=2 parallelism.cp_method=ulysses"),
    ("documents", "parallelism=hsdp training.micro_batch_size=1 training.loss_chunk_tokens=37"),
    ("v3", "parallelism.dp_shard=2 parallelism.ep=2"),
    ("v3", f"parallelism.dp_shard=2 {COMPILED} activation_checkpoint=full"),
    ("documents", "parallelism.pp=2 parallelism.pp_schedule=1F1B"),
    ("v3", "parallelism.pp=2 parallelism.pp_schedule=InterleavedZeroBubble training.loss_chunk_tokens=37"),
    ("v3", "parallelism.pp=2 parallelism.pp_schedule=DualPipeV parallelism.dp_shard=2"),
    ("v3", "parallelism.pp=2 parallelism.tp=2 parallelism.cp=2 parallelism.pp_schedule=Interleaved1F1B"),
    ("deep", "parallelism.pp=2 parallelism.pp_schedule=ZBVZeroBubble training.loss_chunk_tokens=37"),
    ("deep", "parallelism.dp_shard=2 parallelism.tp=2"),
]
"""Experiments and layouts of the night."""


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return remembered(lambda: tmp_path_factory.mktemp("one"), EXPERIMENTS)


@pytest.mark.parametrize(
    ("experiment", "layout"),
    [
        *(pytest.param(*case, marks=pytest.mark.day) for case in DAY),
        *(pytest.param(*case, marks=pytest.mark.night) for case in NIGHT),
    ],
)
def test_layout_does_not_change_the_curve(tmp_path: Path, one_device, experiment: str, layout: str):
    words = [*EXPERIMENTS[experiment].split(), *layout.split()]
    found, expected = train(tmp_path / "many", *words), one_device(experiment)
    assert_same_curve(found, expected)
    assert "objective/mtp_loss_1" in found.rows[0]


@pytest.mark.night
def test_quantized_modules_are_those_of_one_device(tmp_path: Path):
    words = [*MTP.split(), "quantization=float8_tensorwise", "training.steps=3", "optimizer.lr=5e-4"]
    expected = train(tmp_path / "one", *words)
    assert_same_recipe(train(tmp_path / "many", *words, "parallelism.tp=2"), expected)


@pytest.mark.night
def test_resumes_in_another_layout(tmp_path: Path):
    whole, changed = continued(tmp_path, [*MTP.split(), "parallelism.tp=2"], [*MTP.split(), "parallelism.pp=2"])
    assert_continues(whole, changed)


@pytest.mark.night
@pytest.mark.parametrize("layout", ["parallelism.dp_shard=2 parallelism.ep=2", "parallelism.pp=2"])
def test_the_validation_loss_is_the_main_one(tmp_path: Path, layout: str):
    """Evaluations between steps change no curve."""
    words = [*MTP.split(), *PARAGRAPHS, *EVALUATE.split(), "evaluation.every=2"]
    one, many = train(tmp_path / "one", *words), train(tmp_path / "many", *words, *layout.split())
    assert_same_curve(many, one)
    validated = [[row["validation_loss"] for row in curve.rows if "validation_loss" in row] for curve in (one, many)]
    assert len(validated[0]) == 3
    assert validated[1] == pytest.approx(validated[0], rel=2e-6)
