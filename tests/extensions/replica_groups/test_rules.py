"""Rules of replica groups."""

import pytest

from tests.config.composing import experiment, give_gpus
from titan_exp.config.devices import offered_devices
from titan_exp.config.layout.resolved_layout import ResolvedLayout, resolve_layout
from titan_exp.extensions.replica_groups import rules
from titan_exp.extensions.replica_groups.events import record_event
from titan_exp.extensions.replica_groups.lighthouse import TORCHFT
from titan_exp.rules import violations
from titan_exp.tracking.run_folder.run_folder import RunFolder

TWO = ["model=llama_debug", "cluster.device=cpu", "training.global_batch_size=8", "cluster.replica_groups=2"]


@pytest.mark.parametrize(
    ("overrides", "field", "remedy"),
    [
        ([], "", ""),
        (["cluster.replica_groups=1", "parallelism.dp_replicate=2"], "", ""),
        (["parallelism.dp_replicate=2"], "parallelism.dp_replicate", "parallelism.dp_replicate=1"),
        (["cluster.min_groups=3"], "cluster.min_groups", "cluster.min_groups=2 or less"),
        (["cluster.replica_groups=9"], "cluster.replica_groups", "cluster.replica_groups=8 or less"),
        (["training.micro_batch_size=8"], "cluster.replica_groups", "training.micro_batch_size=4"),
        (
            ["training.micro_batch_size=4", "training.batch_ramp=[[3,4]]"],
            "cluster.replica_groups",
            "micro_batch_size=2",
        ),
        (["cluster.replica_groups=3", "training.micro_batch_size=2"], "", ""),
        (["parallelism.pp=2"], "parallelism.pp_microbatches", "pp_microbatches=1, 2 or 4"),
        (["parallelism.pp=2", "parallelism.pp_microbatches=4"], "", ""),
        (
            ["parallelism.pp=2", "parallelism.pp_microbatches=4", "parallelism.pp_schedule=1FB1"],
            "parallelism.pp_schedule",
            "1F1B",
        ),
        (
            ["parallelism.pp=2", "parallelism.pp_microbatches=4", "training.micro_batch_size=2"],
            "cluster.replica_groups",
            "micro_batch_size=1",
        ),
        (["parallelism.pp=2", "parallelism.pp_microbatches=8"], "cluster.replica_groups", "at least 16 sequences"),
        (["model=qwen3_moe_debug"], "", ""),
        (["model.architecture=torch.nn.Linear"], "cluster.replica_groups", "model family"),
        (["checkpoint.remote=s3://bucket/runs"], "checkpoint.remote", "checkpoint.remote=null"),
        (["optimizer=schedule_free_adamw"], "optimizer.name", "another optimizer"),
        (["optimizer=muon", "optimizer.qk_clip=100"], "", ""),
        (["training.objective=tests.trainer.own_objective.LogitStatistics"], "", ""),
        (["cluster.group_timeout_seconds=5"], "cluster.group_timeout_seconds", "group_timeout_seconds=300"),
        (["cluster.group_timeout_seconds=1200"], "cluster.group_timeout_seconds", "group_timeout_seconds=300"),
        (["cluster.hang_kill_minutes=5"], "cluster.group_timeout_seconds", "group_timeout_seconds=100"),
        (["cluster.hang_kill_minutes=null"], "", ""),
        (
            ["cluster.group_heartbeat_seconds=200", "cluster.hang_kill_minutes=5"],
            "cluster.group_timeout_seconds",
            "shorter cluster.group_heartbeat_seconds",
        ),
    ],
)
def test_replica_groups(monkeypatch, overrides, field, remedy):
    monkeypatch.setattr(rules, "torchft_version", lambda: TORCHFT)
    found = violations(experiment(*TWO, *overrides))
    assert [violation.field for violation in found] == ([field] if field else [])
    assert all(remedy in violation.remedy for violation in found)


@pytest.mark.parametrize(("alive", "remedy"), [(0, "a run with replica groups"), (2, ""), (3, "replica_groups=3")])
def test_replayed_history(monkeypatch, tmp_path, alive, remedy):
    monkeypatch.setattr(rules, "torchft_version", lambda: TORCHFT)
    if alive:
        groups = list(range(alive))
        record_event(RunFolder(tmp_path), 1, event="quorum", step=0, quorum=1, groups=groups, joined=[])
    found = violations(experiment(*TWO, f"cluster.group_history={tmp_path}"))
    assert [violation.field for violation in found] == (["cluster.group_history"] if remedy else [])
    assert all(remedy in violation.remedy for violation in found)


def test_groups_of_a_scheduler(monkeypatch):
    monkeypatch.setattr(rules, "torchft_version", lambda: TORCHFT)
    words = ["model=llama_debug", "cluster=slurm", "cluster.replica_groups=2", "cluster.gpus_per_node=1"]
    assert violations(experiment(*words, "cluster.device=cpu")) == []
    assert violations(experiment(*words)) == []
    found = violations(experiment(*words, "cluster.device=cpu", "cluster.kind=my_package.Executor"))
    assert any("cluster=slurm, cluster=local" in violation.remedy for violation in found)


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        ([], None),
        (["parallelism.dp_shard=2"], None),
        (["parallelism.dp_shard=-1"], None),
        (["cluster=slurm", "cluster.gpus_per_node=4", "parallelism.dp_shard=4"], None),
        (["cluster.device=cpu", "parallelism.dp_shard=4"], None),
        (
            ["parallelism.dp_shard=4"],
            "2 groups of 4 processes need 8 GPUs, and you can use 4: use degrees that multiply to 2 or less or "
            "cluster.replica_groups=1",
        ),
        (
            ["cluster.replica_groups=3", "parallelism.tp=2"],
            "3 groups of 2 processes need 6 GPUs, and you can use 4: use cluster.replica_groups=2, degrees that "
            "multiply to 1 or less or cluster.replica_groups=1",
        ),
        (
            ["cluster.gpus_per_node=1"],
            "2 groups of a process need 2 GPUs, and you can use 1: use cluster.replica_groups=1",
        ),
    ],
)
def test_gpus_of_this_machine(monkeypatch, overrides, refused):
    monkeypatch.setattr(rules, "torchft_version", lambda: TORCHFT)
    give_gpus(monkeypatch, 4)
    found = violations(experiment(*TWO, "cluster.device=cuda", *overrides))
    assert [f"{violation.reason}: {violation.remedy}" for violation in found] == ([refused] if refused else [])


@pytest.mark.parametrize(("version", "reason"), [(None, "it is not installed"), ("0.1.1", "you have torchft 0.1.1")])
def test_another_torchft(monkeypatch, version, reason):
    monkeypatch.setattr(rules, "torchft_version", lambda: version)
    (found,) = violations(experiment(*TWO))
    assert reason in found.reason
    assert f"pip install 'torchft=={TORCHFT}'" in found.remedy


def test_every_group_has_a_micro_batch():
    sizes = [
        ResolvedLayout.of(resolve_layout(experiment(*TWO, f"cluster.replica_groups={number}"), 1))
        for number in (1, 2, 3)
    ]
    assert [layout.gradient_accumulation for layout in sizes] == [1, 2, 4]


@pytest.mark.parametrize(
    ("gpus", "overrides", "offered"),
    [
        # Groups share this machine; of a scheduler, each has a job of its own.
        (8, ["cluster.replica_groups=2"], 4),
        (8, ["cluster.replica_groups=3", "cluster.gpus_per_node=7"], 2),
        (0, ["cluster=slurm", "cluster.replica_groups=2", "cluster.nodes=2"], 16),
    ],
)
def test_devices_of_a_group(gpus: int, overrides: list[str], offered: int, monkeypatch: pytest.MonkeyPatch):
    give_gpus(monkeypatch, gpus)
    assert offered_devices(experiment(*overrides).cluster) == offered
