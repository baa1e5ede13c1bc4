"""Promise 1 for pipeline parallelism: every schedule, split and mixture gives the curve of one device."""

from pathlib import Path

import pytest

from tests.parity.runs import EVALUATE, LINES, assert_same_curve, remembered, train
from tests.parity.test_context_parallel import assert_same_evaluation
from tests.parity.test_continued import assert_continues, continued
from titan_exp.config.layout.pipeline_schedules import SCHEDULES
from titan_exp.parallel.pipeline_runtime import build_schedule

AOT = "compile=blocks compile.backend=aot_eager"
SPLIT = [name for name, schedule in SCHEDULES.items() if schedule.splits_backward]
WHOLE = [name for name in SCHEDULES if name not in SPLIT]

EXPERIMENTS = {
    "plain": "",
    "documents": " ".join(LINES) + f" {EVALUATE} training.z_loss=0.01",
    "tied": "model.tied_embeddings=true",
    "3 layers": "model.layers=3",
    "7 layers": "model.layers=7 optimizer.lr=5e-4",
}


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return remembered(lambda: tmp_path_factory.mktemp("one"), EXPERIMENTS)


def pipeline(schedule: str, rest: str = "") -> list[str]:
    return ["parallelism.pp=2", f"parallelism.pp_schedule={schedule}", *rest.split()]


@pytest.mark.proves("llama", "pp")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_with_documents_and_evaluation(tmp_path: Path, one_device, schedule: str):
    found = train(tmp_path, *pipeline(schedule), *EXPERIMENTS["documents"].split())
    assert_same_curve(found, one_device("documents"))
    assert_same_evaluation(found, one_device("documents"))


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "InterleavedZeroBubble", "DualPipeV"])
def test_tied_embeddings_across_stages(tmp_path: Path, one_device, schedule: str):
    """The copies are on two ranks, or on one (DualPipeV's first has the last stage)."""
    layout = pipeline(schedule, "parallelism.dp_shard=2")
    assert_same_curve(train(tmp_path, *layout, *EXPERIMENTS["tied"].split()), one_device("tied"))


@pytest.mark.parametrize(
    "layout",
    [
        pipeline("1F1B", "parallelism.dp_shard=2 parallelism.reshard_after_forward=always training.micro_batch_size=1"),
        pipeline("Interleaved1F1B", "parallelism.dp_shard=2 parallelism.reshard_after_forward=all_but_last"),
        pipeline("LoopedBFS", "parallelism=ddp training.micro_batch_size=2"),
        pipeline("ZBVZeroBubble", "parallelism=hsdp training.micro_batch_size=1"),
        pipeline("InterleavedZeroBubble", "parallelism.dp_shard=2 parallelism.cpu_offload=true"),
        pipeline("1F1B", "parallelism.cp=2"),
        pipeline("ZBVZeroBubble", "parallelism.cp=2 parallelism.cp_method=allgather training.micro_batch_size=2"),
        pipeline("DualPipeV", "parallelism.cp=2 parallelism.cp_method=ulysses"),
        pipeline("DualPipeV", "activation_checkpoint=full parallelism.dp_shard=2"),
        pipeline("InterleavedZeroBubble", "activation_checkpoint=every_n"),
        pipeline("1F1B", "activation_checkpoint=selective"),
        pipeline("ZBVZeroBubble", f"{AOT} activation_checkpoint=full"),
        pipeline("InterleavedZeroBubble", f"{AOT} activation_checkpoint=budget"),
        pipeline("DualPipeV", f"{AOT} activation_checkpoint=selective"),
        pipeline("ZBVZeroBubble", "training.loss_chunk_tokens=37 parallelism.dp_shard=2"),
        pipeline("InterleavedZeroBubble", "training.loss_chunk_tokens=16384"),
        pipeline("1F1B", "training.micro_batch_size=1 parallelism.pp_microbatches=2"),
        pipeline("DualPipeV", "training.micro_batch_size=1 parallelism.pp_microbatches=4 parallelism.dp_shard=2"),
        pipeline("ZBVZeroBubble", "training.micro_batch_size=8"),
        ["parallelism.pp=4", "training.micro_batch_size=2"],
        ["parallelism.pp=4", "training.micro_batch_size=4"],
    ],
    ids=" ".join,
)
def test_mixtures(tmp_path: Path, one_device, layout: list[str]):
    assert_same_curve(train(tmp_path, *layout), one_device("plain"))


@pytest.mark.parametrize(
    ("experiment", "layout"),
    [
        ("3 layers", pipeline("1F1B", "parallelism.pp_layers=[3,0]")),
        ("3 layers", pipeline("DualPipeV", "parallelism.pp_layers=[0,2,1,0] parallelism.dp_shard=2")),
        ("7 layers", pipeline("GPipe")),
        (
            "7 layers",
            pipeline("InterleavedZeroBubble", "parallelism.pp_first_stage_less=1 parallelism.pp_last_stage_less=1"),
        ),
        ("7 layers", ["parallelism.pp=3", "parallelism.pp_schedule=LoopedBFS", "parallelism.pp_layers_per_stage=3"]),
        ("7 layers", pipeline("Interleaved1F1B", "parallelism.pp_layers=[1,1,2,1,1,1]")),
        ("7 layers", ["parallelism.pp=3", "parallelism.pp_schedule=ZBVZeroBubble", "training.micro_batch_size=1"]),
    ],
)
def test_splits(tmp_path: Path, one_device, experiment: str, layout: list[str]):
    """7 layers amplify rounding at the usual learning rate, on one device too; so they have a lower one."""
    assert_same_curve(train(tmp_path, *layout, *EXPERIMENTS[experiment].split()), one_device(experiment))


def test_a_schedule_from_a_file(tmp_path: Path, one_device):
    """Of our own making: ZBV's for another number of micro-batches, read back, in several passes."""
    path = tmp_path / "zbv.csv"
    path.write_text("\n".join(",".join(map(str, order)) for order in build_schedule("ZBVZeroBubble", 2, 4, 4)))
    layout = pipeline(str(path), "training.micro_batch_size=1 parallelism.dp_shard=2")
    assert_same_curve(train(tmp_path / "four", *layout), one_device("plain"))
    assert_same_curve(train(tmp_path / "eight", *layout[:3]), one_device("plain"))


@pytest.mark.parametrize(
    ("before", "after", "experiment"),
    [
        ([], pipeline("ZBVZeroBubble", "parallelism.dp_shard=2"), "model.tied_embeddings=true"),
        (pipeline("1F1B", "parallelism.dp_shard=2"), pipeline("DualPipeV"), "model.tied_embeddings=true"),
        (pipeline("InterleavedZeroBubble"), ["parallelism.dp_shard=2"], ""),
    ],
)
def test_resumes_in_another_layout(tmp_path: Path, before: list[str], after: list[str], experiment: str):
    assert_continues(*continued(tmp_path, [*before, *experiment.split()], [*after, *experiment.split()]))


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_bf16_stays_within_its_rounding(tmp_path: Path, schedule: str):
    """Tolerances are those of data parallelism in bf16; weights' gradients are summed in fp32 over micro-batches."""
    bf16 = ["training.mixed_precision=bf16", "training.micro_batch_size=1"]
    alone = train(tmp_path / "one", *bf16)
    found = train(tmp_path / "many", *bf16, *pipeline(schedule, "parallelism.dp_shard=2"))
    assert found.loss == pytest.approx(alone.loss, rel=2e-3)
    assert found.grad_norm[0] == pytest.approx(alone.grad_norm[0], rel=5e-3)
    assert found.grad_norm == pytest.approx(alone.grad_norm, rel=1e-1)


def test_modules_in_fp32_that_some_stages_do_not_have(tmp_path: Path):
    bf16 = "training.mixed_precision=bf16 training.fp32_modules=[embedding,blocks.0,blocks.*.attention_norm,head]"
    found = train(tmp_path / "many", *bf16.split(), *pipeline("1F1B", "parallelism.dp_shard=2"))
    alone = train(tmp_path / "one", *bf16.split())
    assert found.loss == pytest.approx(alone.loss, rel=2e-3)
    assert found.grad_norm[0] == pytest.approx(alone.grad_norm[0], rel=5e-3)
