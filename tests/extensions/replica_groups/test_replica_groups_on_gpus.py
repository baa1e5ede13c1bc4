"""Replica groups on GPUs: the curve is that of one group, whatever dies. Cases for one GPU run on a CPU, too."""

import json
from pathlib import Path

import pytest

from tests.extensions.replica_groups.fleet import Dies
from tests.extensions.replica_groups.test_replica_groups import run_with_death
from tests.extensions.replica_groups.test_semi_sync import STREAMING, train_groups
from tests.parity.runs import LINES, train
from tests.parity.test_one_gpu import DEVICES, assert_agrees
from tests.staged import show_gpus_to_rules, use_one_device
from titan_exp.extensions.replica_groups.events import ReplicaGroup
from titan_exp.extensions.replica_groups.lighthouse import TORCHFT, torchft_version

pytestmark = pytest.mark.skipif(torchft_version() != TORCHFT, reason=f"needs torchft {TORCHFT}")
SETTINGS = [*LINES, "training.steps=10", "training.global_batch_size=6", "training.micro_batch_size=1"]
TWO = [*SETTINGS, "cluster.replica_groups=2"]


@pytest.fixture(autouse=True)
def _groups_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    show_gpus_to_rules(monkeypatch)


def _on_one_device(_: ReplicaGroup) -> None:
    """Ranks of all groups are on the first GPU, and those of a group exchange by way of the host."""
    use_one_device()


def _dies_on_one_device(group: ReplicaGroup) -> None:
    _on_one_device(group)
    Dies(3, "sum_gradients")(group)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "parallelism.dp_shard=2 parallelism.reshard_after_forward=always",
        "parallelism.tp=2 training.mixed_precision=bf16",
        "model=deepseek_debug",
        "optimizer=muon optimizer.lr=2e-3 optimizer.eps=1e-4 optimizer.qk_clip=0.1",
        "parallelism.pp=2 parallelism.pp_microbatches=3",
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_a_death_on_one_device_leaves_the_curve(tmp_path: Path, device: str, words: str):
    chosen = [f"cluster.device={device}", *words.split()]
    found, fleet = run_with_death(tmp_path / "run", [*TWO, *chosen], _dies_on_one_device)
    expected = train(tmp_path / "one", *SETTINGS, *chosen, mutate=use_one_device)
    assert_agrees(found, expected)
    assert {row["participants"] for row in found.rows} == {1, 2}
    assert [json.loads(line)["step"] for line in fleet.lines()] == list(range(1, 11))


@pytest.mark.parametrize("device", DEVICES)
def test_a_fragment_in_flight_on_one_device(tmp_path: Path, device: str):
    words = [*STREAMING, "parallelism.dp_shard=2", f"cluster.device={device}"]
    found = train_groups(tmp_path / "run", words, _on_one_device)
    assert_agrees(found, train_groups(tmp_path / "cpu", [*STREAMING, "cluster.device=cpu"]))
