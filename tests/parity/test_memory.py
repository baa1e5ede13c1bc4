"""Memory options (checkpointing, offloading, chunked loss) do not change the curve."""

from pathlib import Path

import pytest

from tests.parity.runs import LINES, Curve, assert_same_curve, remembered, train

FSDP2 = "parallelism.dp_shard=2"
HSDP = "parallelism=hsdp"
DDP2 = "parallelism=ddp"
AOT = "compile=blocks compile.backend=aot_eager"
CHECKPOINTING = [
    f"{FSDP2} activation_checkpoint=every_n activation_checkpoint.every=3 training.micro_batch_size=2",
    f"activation_checkpoint=every_n {AOT}",
    f"{FSDP2} activation_checkpoint=selective training.micro_batch_size=1",
    pytest.param(
        f"{HSDP} activation_checkpoint=selective activation_checkpoint.save=[aten.mm]", marks=pytest.mark.night
    ),
    f"{FSDP2} activation_checkpoint=selective training.micro_batch_size=2 {AOT}",
    f"{FSDP2} activation_checkpoint=budget training.micro_batch_size=2 {AOT}",
    f"parallelism.tp=2 activation_checkpoint=budget {AOT}",
]
CHUNKED = [
    "training.loss_chunk_tokens=1000",
    f"{FSDP2} training.loss_chunk_tokens=37 training.micro_batch_size=1",
    pytest.param(f"{HSDP} training.loss_chunk_tokens=16384 activation_checkpoint=selective", marks=pytest.mark.night),
    f"{DDP2} training.loss_chunk_tokens=50 training.micro_batch_size=2 activation_checkpoint=full {AOT}",
]
LOSS = "compile=all compile.components=[loss] compile.backend=aot_eager"
COMPILED_LOSS = [
    LOSS,
    f"{FSDP2} training.micro_batch_size=1 compile=all compile.backend=aot_eager",
    f"{FSDP2} {LOSS} training.loss_chunk_tokens=37 training.micro_batch_size=1",
    f"{DDP2} training.loss_chunk_tokens=16384 training.micro_batch_size=2 compile=all compile.backend=aot_eager",
]
EXPERIMENTS = {
    "plain": "",
    "tied": "model.tied_embeddings=true",
    "z_loss": "training.z_loss=0.01",
    "evaluated": " ".join([*LINES, "evaluation.every=5", "training.z_loss=0.01"]),
}


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return remembered(lambda: tmp_path_factory.mktemp("one"), EXPERIMENTS)


def evaluations(curve: Curve) -> list[float]:
    return [row["validation_loss"] for row in curve.rows if row.get("validation_loss") is not None]


@pytest.mark.parametrize("layout", [*CHECKPOINTING, *CHUNKED, *COMPILED_LOSS])
def test_the_curve_stays(tmp_path: Path, one_device, layout: str):
    assert_same_curve(train(tmp_path, *layout.split()), one_device("plain"))


@pytest.mark.parametrize("experiment", ["tied", "z_loss"])
@pytest.mark.parametrize("layout", CHUNKED[1:3])
def test_that_of_another_experiment_too(tmp_path: Path, one_device, layout: str, experiment: str):
    assert_same_curve(train(tmp_path, *layout.split(), *EXPERIMENTS[experiment].split()), one_device(experiment))


@pytest.mark.parametrize("layout", [CHUNKED[1], *COMPILED_LOSS[1:3]])
def test_evaluation_is_by_the_same_code_and_leaves_z_loss_out(tmp_path: Path, one_device, layout: str):
    found = train(tmp_path, *EXPERIMENTS["evaluated"].split(), *layout.split())
    assert_same_curve(found, one_device("evaluated"))
    assert len(evaluations(found)) == 2
    assert evaluations(found) == pytest.approx(evaluations(one_device("evaluated")), rel=2e-6)


def test_z_loss_is_trained_on_and_not_logged(one_device):
    """The first step has the weights of the plain run: the same cross-entropy, other gradients."""
    plain, pulled = one_device("plain"), one_device("z_loss")
    assert pulled.loss[0] == plain.loss[0]
    assert pulled.grad_norm[0] != pytest.approx(plain.grad_norm[0], rel=1e-4)
    assert pulled.loss[-1] != plain.loss[-1]


@pytest.mark.parametrize("compiled", ["", LOSS])
def test_bf16_in_chunks_stays_within_its_rounding(tmp_path: Path, compiled: str):
    bf16 = ["training.mixed_precision=bf16", FSDP2, "training.micro_batch_size=1"]
    whole = train(tmp_path / "whole", *bf16)
    chunked = train(tmp_path / "chunked", *bf16, "training.loss_chunk_tokens=50", *compiled.split())
    assert chunked.loss == pytest.approx(whole.loss, rel=2e-3)
    assert chunked.grad_norm[0] == pytest.approx(whole.grad_norm[0], rel=5e-3)
    assert chunked.loss != whole.loss
