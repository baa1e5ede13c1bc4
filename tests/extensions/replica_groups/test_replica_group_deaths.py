"""Replica groups that die while one heals or saves: the curve stays that of one device."""

import os
import signal
from typing import Any

import pytest
import torch

from tests.extensions.replica_groups.fleet import Dies, Fleet, await_heartbeat
from tests.extensions.replica_groups.test_replica_groups import SETTINGS, THREE, assert_exact
from tests.parity.runs import train
from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.extensions.replica_groups.events import ReplicaGroup
from titan_exp.extensions.replica_groups.lighthouse import TORCHFT, torchft_version

pytestmark = [
    pytest.mark.night,
    pytest.mark.skipif(torchft_version() != TORCHFT, reason=f"needs torchft {TORCHFT}"),
]


def _dies_healing(group: ReplicaGroup) -> None:
    """Group 1 dies after step 3, its second start within the transfer of the state, and the third comes at step 7."""
    from titan_exp.extensions.replica_groups.groups import ReplicaGroups

    Dies(3, "sum_gradients")(group)
    join = ReplicaGroups.join

    def joined(groups: ReplicaGroups, step: int, *position: int | None) -> Any:
        if step == 7:
            await_heartbeat(groups, 1, 3)
        return join(groups, step, *position)

    def dying(groups: ReplicaGroups, _: Any) -> None:
        assert groups.quorum is not None
        groups._client.process_group.recv([torch.zeros(1, dtype=torch.int64)], groups.quorum.source, 0).wait()
        os.kill(os.getpid(), signal.SIGKILL)

    ReplicaGroups.join = joined  # type: ignore[method-assign]
    if group.start == 2:
        ReplicaGroups.receive_state = dying  # type: ignore[method-assign]


def test_a_death_while_healing(tmp_path):
    expected = train(tmp_path / "one", *SETTINGS, "cluster.replica_groups=1")
    fleet = Fleet(tmp_path / "run", *SETTINGS)
    try:
        first, *dead = fleet.start_all(_dies_healing)
        for _ in range(2):
            fleet.await_death(dead[-1])
            dead.append(fleet.start(1, _dies_healing))
        found = fleet.curve([first, dead[-1]])
    finally:
        fleet.close()
    assert_exact(found, fleet, expected)
    assert found.rows[-1]["participants"] == 2


def _dies_sending(group: ReplicaGroup) -> None:
    """Group 1 dies after step 3, and the group from which its second start heals dies within the transfer."""
    from titan_exp.extensions.replica_groups.groups import ReplicaGroups

    Dies(3, "sum_gradients")(group)
    send = ReplicaGroups._send

    def dying(groups: ReplicaGroups, rank: int, *arguments: Any) -> None:
        folder = groups._folder.path
        if list(folder.glob("dead-*")):
            send(groups, rank, *arguments)
            return
        (folder / f"dead-{group.number}").touch()
        groups._client.process_group.send([torch.tensor([8])], groups._client.order[rank], 0).wait()
        os.kill(os.getpid(), signal.SIGKILL)

    ReplicaGroups._send = dying  # type: ignore[method-assign]


def test_a_newcomer_whose_sender_dies_heals_from_another_group(tmp_path):
    expected = train(tmp_path / "one", *SETTINGS, "cluster.replica_groups=1")
    fleet = Fleet(tmp_path / "run", *THREE)
    try:
        groups = fleet.start_all(_dies_sending)
        fleet.await_death(groups[1])
        groups[1] = fleet.start(1, _dies_sending)
        dead = fleet.await_dead()
        found = fleet.curve([groups[number] for number in {0, 1, 2} - {dead}])
    finally:
        fleet.close()
    assert_exact(found, fleet, expected)
    assert found.rows[-1]["participants"] == 2
    assert len(fleet.groups) == 4, "the newcomer was not started again"
    assert max(row["stall"] for row in found.rows) < 10, "no connection stayed open until the time-out of 20 s"


def _dies_saving(group: ReplicaGroup) -> None:
    """The leader dies while the state after step 4 is written in the background."""
    from titan_exp.checkpoint.checkpointer import Checkpointer

    save = Checkpointer.save

    def dying(checkpointer: Checkpointer, step: int, *arguments: Any, **named: Any) -> None:
        save(checkpointer, step, *arguments, **named)
        if step == 4 and group.start < 2:
            (checkpointer.folder.path.parent / f"dead-{group.number}").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    Checkpointer.save = dying  # type: ignore[method-assign]


def test_a_death_while_saving(tmp_path):
    settings = [*SETTINGS, "checkpoint=async", "checkpoint.every=4"]
    expected = train(tmp_path / "one", *settings, "cluster.replica_groups=1")
    fleet = Fleet(tmp_path / "run", *settings)
    try:
        groups = fleet.start_all(_dies_saving)
        dead = fleet.await_dead()
        groups[dead].kill()
        groups[dead] = fleet.start(dead, _dies_saving)
        found = fleet.curve([groups[1 - dead]])
    finally:
        fleet.close()
    assert_exact(found, fleet, expected)
    assert max(CheckpointFolder(fleet.folder.checkpoints).complete_steps()) == 10
