"""Parts of the user's in replica groups and in semi-synchronous training: when they are called, and what they keep."""

from pathlib import Path

import pytest

from tests.extensions.replica_groups.fleet import Dies, Fleet, Mutation
from tests.extensions.replica_groups.own_parts import Call, journal
from tests.parity.runs import LINES
from titan_exp.extensions.replica_groups.lighthouse import TORCHFT, torchft_version
from titan_exp.tracking.run_folder.metrics_jsonl import MetricRows, read_metrics

pytestmark = pytest.mark.skipif(torchft_version() != TORCHFT, reason=f"needs torchft {TORCHFT}")
GROUPS = [*LINES, "training.global_batch_size=4", "training.micro_batch_size=1", "cluster.replica_groups=2"]
DILOCO = [*GROUPS, "training.steps=6", "semi_sync=diloco", "semi_sync.interval=2", "optimizer.weight_decay=0"]
STEPS = 8
TOGETHER = [*GROUPS, f"training.steps={STEPS}"]


def parts(**options: int) -> list[str]:
    words = ",".join(f"{name}:{value}" for name, value in options.items())
    own = {"mine": "Observes", "judge": "Decides"}
    where = "tests.extensions.replica_groups.own_parts"
    return [f"+training.parts.{label}={{name:{where}.{name},options:{{{words}}}}}" for label, name in own.items()]


def run(path: Path, words: list[str], mutate: Mutation | None = None) -> MetricRows:
    """Rows of a run whose groups agree on the weights."""
    fleet = Fleet(path, *words)
    try:
        assert fleet.curve(fleet.start_all(mutate)).disputed == []
    finally:
        fleet.close()
    return read_metrics(path / "metrics.jsonl")


def test_a_group_that_comes_back_takes_over_their_state(tmp_path: Path):
    fleet = Fleet(tmp_path, *TOGETHER, *parts())
    mutate = Dies(3, "sum_gradients")
    try:
        first, dead = fleet.start_all(mutate)
        fleet.await_death(dead)
        fleet.wait_until(lambda: len(fleet.lines()) >= 5)
        rows = fleet.curve([first, fleet.start(1, mutate)]).rows
    finally:
        fleet.close()
    for label in ("mine", "judge"):
        assert [row[f"{label}/steps"] for row in rows] == list(range(1, STEPS + 1))
        calls = journal(tmp_path, label)
        # A step that groups repeat does not count: every group has counted each step once, before and after it healed.
        assert all(call.steps == call.step and call.agreed for call in calls)
        assert [call.step for call in calls if call.group == 0] == list(range(1, STEPS + 1))
        came_back = [call.step for call in calls if call.start == 2]
        assert came_back == list(range(came_back[0], STEPS + 1))
        assert came_back[0] > 3


def test_between_synchronizations_they_observe_and_do_not_decide(tmp_path: Path):
    rows = run(tmp_path, [*DILOCO, *parts()])
    for group in (0, 1):
        mine, judge = (
            [call for call in journal(tmp_path, label) if call.group == group] for label in ("mine", "judge")
        )
        assert [(call.step, call.agreed) for call in mine] == [(step, int(step % 2 == 0)) for step in range(1, 7)]
        assert [(call.step, call.agreed) for call in judge] == [(2, 1), (4, 1), (6, 1)]
    assert [row["judge/steps"] for row in rows if "judge/steps" in row] == [1, 2, 3]
    assert [row["step"] for row in rows if "judge/steps" in row] == [2, 4, 6]


@pytest.mark.parametrize(("words", "last"), [(DILOCO, 6), (TOGETHER, STEPS)], ids=["diloco", "together"])
def test_their_state_survives_a_kill_of_all_groups(tmp_path: Path, words: list[str], last: int):
    words = [*words, *parts(die_at=5, saved=4), "checkpoint=sync", "checkpoint.every=4"]
    fleet = Fleet(tmp_path, *words)
    try:
        for group in fleet.start_all():
            fleet.await_death(group)
    finally:
        fleet.close()
    rows = run(tmp_path, words)
    mine = journal(tmp_path, "mine")
    assert all(call.steps == call.step for call in mine)
    assert {call.step for call in mine} == set(range(1, last + 1))
    judged = {call.step: call.steps for call in journal(tmp_path, "judge")}
    assert judged == ({2: 1, 4: 2, 6: 3} if last == 6 else {step: step for step in range(1, last + 1)})
    assert rows[-1]["mine/steps"] == last
    assert Call(1, 1, last, last, 1) in mine
