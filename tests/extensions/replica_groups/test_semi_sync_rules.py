"""Rules of semi-synchronous training, and its part in run ids."""

import pytest

from tests.config.composing import experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout, resolve_layout
from titan_exp.extensions.replica_groups import rules
from titan_exp.extensions.replica_groups.events import record_event
from titan_exp.extensions.replica_groups.lighthouse import TORCHFT
from titan_exp.launch.run_plan import experiment_id, run_id
from titan_exp.rules import violations
from titan_exp.tracking.run_folder.run_folder import RunFolder

SMALL = ["model=llama_debug", "cluster.device=cpu", "training.global_batch_size=8"]
STREAMING = ["semi_sync=streaming_diloco", "training.steps=300", "evaluation.every=0", "checkpoint=none"]
TWO = [*SMALL, "cluster.replica_groups=2", "semi_sync=diloco"]

BATCH = "training.global_batch_size", "training.global_batch_size=8"


@pytest.mark.parametrize(
    ("overrides", "field", "remedy"),
    [
        ([], "", ""),
        (["semi_sync=local_sgd", "parallelism.dp_shard=4"], "", ""),
        (["cluster.replica_groups=1"], "cluster.replica_groups", "cluster.replica_groups=2, or semi_sync=none"),
        (["cluster.replica_groups=4"], "cluster.replica_groups", "cluster.replica_groups=2, or semi_sync.groups=4"),
        (["semi_sync.groups=1", "cluster.replica_groups=1"], "semi_sync.groups", "semi_sync.groups=2"),
        (["training.steps=120"], "training.steps", "training.steps=100 or 150"),
        (["training.steps=120", "training.stop_after=100"], "", ""),
        (["training.stop_after=120"], "training.stop_after", "training.stop_after=100 or 150"),
        (["evaluation.every=60"], "evaluation.every", "evaluation.every=50 or 100"),
        (["evaluation.every_tokens=1000"], "evaluation.every_tokens", "evaluation.every_tokens=null"),
        (["evaluation.every_tokens=1000", "evaluation.every=0"], "", ""),
        (["checkpoint.every=70"], "checkpoint.every", "checkpoint.every=50 or 100"),
        (["checkpoint.every=70", "checkpoint=none"], "", ""),
        (["checkpoint.export=bf16", "checkpoint.export_every=20"], "checkpoint.export_every", "export_every=50"),
        (["training.global_batch_size=7"], "training.global_batch_size", "training.global_batch_size=8"),
        (["training.batch_ramp=[[3,5]]"], "training.global_batch_size", "training.global_batch_size=6"),
        (["parallelism.dp_shard=4", "training.global_batch_size=12"], "training.global_batch_size", "=16"),
        (["training.micro_batch_size=3", "training.global_batch_size=12"], "", ""),
        (["weight_average=ema"], "weight_average.mode", "weight_average=none"),
        (["optimizer=schedule_free_adamw"], "optimizer.name", "another optimizer"),
        (["optimizer=muon", "optimizer.qk_clip=100"], "", ""),
        (["parallelism.pp=2", "parallelism.pp_microbatches=2"], "", ""),
        (["parallelism.pp=2"], "parallelism.pp_microbatches", "parallelism.pp_microbatches=1, 2 or 4"),
        (["parallelism.pp=2", "parallelism.pp_microbatches=2", "training.global_batch_size=6"], *BATCH),
        (["model=qwen3_moe_debug"], "", ""),
        (["semi_sync=local_sgd", "semi_sync.outer_lr=0.5"], "semi_sync.outer_lr", "semi_sync=diloco"),
        (["semi_sync=none", "semi_sync.interval=10"], "semi_sync.interval", "=diloco or semi_sync=streaming_diloco"),
        ([*STREAMING], "", ""),
        ([*STREAMING, "semi_sync.fragments=5"], "semi_sync.fragments", "semi_sync.fragments=4 or less"),
        ([*STREAMING, "semi_sync.delay=12"], "semi_sync.delay", "delay=11 or less, or semi_sync.interval=52 or more"),
        ([*STREAMING, "semi_sync.fragments=1", "semi_sync.delay=50"], "semi_sync.delay", "semi_sync.delay=49 or less"),
        ([*STREAMING, "semi_sync.fragments=1", "semi_sync.delay=49"], "", ""),
        ([*STREAMING, "semi_sync.interval=2", "semi_sync.delay=0"], "semi_sync.fragments", "semi_sync.fragments=2"),
        ([*STREAMING, "semi_sync.interval=4"], "semi_sync.delay", "semi_sync.delay=0, or semi_sync.interval=8"),
        (["semi_sync.delay=3"], "semi_sync.delay", "semi_sync=streaming_diloco"),
    ],
)
def test_semi_sync(monkeypatch, overrides, field, remedy):
    monkeypatch.setattr(rules, "torchft_version", lambda: TORCHFT)
    found = violations(experiment(*TWO, *overrides))
    assert [violation.field for violation in found] == ([field] if field else [])
    assert all(remedy in violation.remedy for violation in found)


def test_a_history_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(rules, "torchft_version", lambda: TORCHFT)
    record_event(RunFolder(tmp_path), 1, event="quorum", step=0, quorum=1, groups=[0, 1], joined=[])
    (found,) = violations(experiment(*TWO, f"cluster.group_history={tmp_path}"))
    assert found.field == "cluster.group_history"


def test_micro_batches_are_divided_evenly():
    layout = ResolvedLayout.of(resolve_layout(experiment(*TWO, "training.global_batch_size=12"), 1))
    assert (layout.micro_batch_size, layout.gradient_accumulation) == (6, 2)


def test_groups_and_interval_are_in_the_ids_and_only_then():
    def ids(*words: str) -> tuple[str, str]:
        made = resolve_layout(experiment(*SMALL, *words), 1)
        return run_id(made), experiment_id(made)

    synchronous = ids()
    assert ids("cluster.replica_groups=2", "semi_sync=none") == synchronous
    runs = [
        ids("semi_sync=diloco"),
        ids("semi_sync=local_sgd"),
        ids("semi_sync=diloco", "semi_sync.interval=10"),
        ids("semi_sync=diloco", "semi_sync.groups=4"),
        ids("semi_sync=diloco", "semi_sync.outer_lr=0.5"),
        ids("semi_sync=streaming_diloco"),
        ids("semi_sync=streaming_diloco", "semi_sync.fragments=2"),
        ids("semi_sync=streaming_diloco", "semi_sync.fragment_pattern=sequential"),
        ids("semi_sync=streaming_diloco", "semi_sync.delay=2"),
        ids("semi_sync=streaming_diloco", "semi_sync.mixing=0.25"),
        ids("semi_sync=streaming_diloco", "semi_sync.interval=10"),
    ]
    assert len({synchronous, *runs}) == 12
    assert len({experiment_id for _, experiment_id in (synchronous, *runs)}) == 12
    assert ids("semi_sync=diloco", "cluster.replica_groups=2", "parallelism.dp_shard=2")[1] == runs[0][1]
