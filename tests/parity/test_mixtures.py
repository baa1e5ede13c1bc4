"""Promise 1 for everything at once: mixtures of data, tensor, pipeline and context parallelism, up to 16 ranks.

Among them are those that other trainers disable, refuse or never check: zero-bubble, V-shaped and CSV schedules, more
tensor-parallel ranks than key and value heads, tied embeddings over stages, and copies or shards with context and
tensor parallelism.
"""

from pathlib import Path

import pytest

from tests.parity.runs import EVALUATE, LINES, PARAGRAPHS, assert_same_curve, remembered, train
from tests.parity.test_context_parallel import assert_same_evaluation
from tests.parity.test_continued import assert_continues, continued
from titan_exp.parallel.pipeline_runtime import build_schedule

EXPERIMENTS = {
    "plain": "",
    "documents": " ".join([*LINES, "training.z_loss=0.01"]),
    "evaluated": " ".join([*PARAGRAPHS, EVALUATE]),
    "tied": "model.tied_embeddings=true model.vocab_size=257",
    "one kv head": "model.kv_heads=1",
    "no groups": "model.kv_heads=4",
}
FOUR_D = "parallelism.pp=2 parallelism.dp_shard=2 parallelism.cp=2 parallelism.tp=2"


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return remembered(lambda: tmp_path_factory.mktemp("one"), EXPERIMENTS)


@pytest.mark.parametrize(
    ("experiment", "layout"),
    [
        # Four ranks.
        ("evaluated", "parallelism.pp=2 parallelism.tp=2 parallelism.pp_schedule=ZBVZeroBubble"),
        ("tied", "parallelism.pp=2 parallelism.tp=2 parallelism.pp_schedule=DualPipeV training.loss_chunk_tokens=37"),
        ("tied", "parallelism.pp=2 parallelism.tp=2 parallelism.sequence_parallel=false"),
        # Eight.
        ("documents", "parallelism.pp=2 parallelism.dp_shard=2 parallelism.tp=2 training.loss_chunk_tokens=64"),
        ("one kv head", "parallelism.pp=2 parallelism.tp=4 parallelism.pp_schedule=InterleavedZeroBubble"),
        ("plain", "parallelism.dp_replicate=2 parallelism.dp_shard=2 parallelism.cp=2 activation_checkpoint=full"),
        ("no groups", "parallelism.tp=2 parallelism.cp=4 parallelism.cp_ulysses=2 activation_checkpoint=selective"),
        pytest.param(
            "plain",
            "parallelism.pp=2 parallelism=ddp parallelism.tp=2 compile=all compile.backend=aot_eager",
            marks=pytest.mark.night,
        ),
        ("plain", "parallelism.pp=4 parallelism.tp=2 parallelism.loss_parallel=false training.micro_batch_size=2"),
        # Sixteen.
        ("documents", f"{FOUR_D} training.micro_batch_size=1"),
        ("tied", f"{FOUR_D} parallelism.pp_schedule=ZBVZeroBubble parallelism.cp_method=allgather"),
        ("no groups", f"{FOUR_D} parallelism.cp_method=ulysses parallelism.pp_schedule=Interleaved1F1B"),
        ("plain", "parallelism.pp=2 parallelism=hsdp parallelism.tp=2 parallelism.pp_schedule=LoopedBFS"),
    ],
)
def test_mixtures_do_not_change_the_curve(tmp_path: Path, one_device, experiment, layout):
    found = train(tmp_path, *EXPERIMENTS[experiment].split(), *layout.split(), timeout=300)
    assert_same_curve(found, one_device(experiment))
    if experiment == "evaluated":
        assert_same_evaluation(found, one_device(experiment))


@pytest.mark.night  # eight ranks; by day test_pipeline_parallel reads a schedule from a file
def test_a_schedule_from_a_file_among_others(tmp_path: Path, one_device):
    path = tmp_path / "dual.csv"
    path.write_text("\n".join(",".join(map(str, order)) for order in build_schedule("DualPipeV", 2, 4, 8)))
    layout = ["parallelism.pp=2", f"parallelism.pp_schedule={path}", "parallelism.tp=2", "parallelism.cp=2"]
    found = train(tmp_path / "run", *EXPERIMENTS["tied"].split(), *layout, timeout=300)
    assert_same_curve(found, one_device("tied"))


@pytest.mark.night
@pytest.mark.parametrize(
    "after",
    [
        "",
        "parallelism.pp=2 parallelism.pp_schedule=DualPipeV parallelism.tp=2",
        "parallelism=hsdp parallelism.cp=2",
        "parallelism.tp=4 parallelism.dp_shard=2",
    ],
)
def test_resumes_in_any_other_layout(tmp_path: Path, after):
    """Stopped with stages, shards and divided matrices; tied, and of an uneven vocabulary."""
    before = "parallelism.pp=2 parallelism.dp_shard=2 parallelism.tp=2"
    tied = EXPERIMENTS["tied"].split()
    whole, changed = continued(tmp_path, [*before.split(), *tied], [*after.split(), *tied])
    assert_continues(whole, changed)
