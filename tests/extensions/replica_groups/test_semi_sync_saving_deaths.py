"""Groups of semi-synchronous training that die while they save, send a state to be saved, or heal."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extensions.replica_groups.fleet import Dies, Fleet, Mutation, await_heartbeat
from tests.extensions.replica_groups.semi_sync_reference import reference
from tests.extensions.replica_groups.test_semi_sync import assert_same
from tests.extensions.replica_groups.test_semi_sync_deaths import LONG, SAVED
from tests.parity.runs import Curve
from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.checkpoint.storage_reader import tensor_shapes
from titan_exp.extensions.replica_groups.events import ReplicaGroup
from titan_exp.extensions.replica_groups.lighthouse import TORCHFT, torchft_version

pytestmark = [
    pytest.mark.night,
    pytest.mark.skipif(torchft_version() != TORCHFT, reason=f"needs torchft {TORCHFT}"),
]


class _DiesAround:
    """A group dies the first time that `patched` methods call `die`. The other waits before the synchronization after
    step 6 until it is back."""

    def __init__(self, patch: Callable[[Callable[[], None]], None]) -> None:
        self.patch = patch

    def __call__(self, group: ReplicaGroup) -> None:
        from titan_exp.extensions.replica_groups.groups import ReplicaGroups

        join, folder = ReplicaGroups.join, list[Path]()

        def joined(groups: ReplicaGroups, step: int, *position: int | None) -> Any:
            folder[:] = [groups._folder.path]
            if step == 6:
                await_heartbeat(groups, 1 - group.number, 2 if group.start < 2 else 0)
            return join(groups, step, *position)

        def die() -> None:
            (folder[0] / f"dead-{group.number}").touch()
            os.kill(os.getpid(), signal.SIGKILL)

        ReplicaGroups.join = joined  # type: ignore[method-assign]
        if group.start < 2:
            self.patch(die)


def _while_saving(die: Callable[[], None]) -> None:
    """The writer, while the state after step 4 is written in the background."""
    from titan_exp.checkpoint.checkpointer import Checkpointer

    save = Checkpointer.save

    def dying(checkpointer: Checkpointer, step: int, *arguments: Any, **named: Any) -> None:
        save(checkpointer, step, *arguments, **named)
        if step == 4:
            die()

    Checkpointer.save = dying  # type: ignore[method-assign]


def _while_sending(die: Callable[[], None]) -> None:
    """The other group, while it sends its state to the writer, which has the description of it already."""
    from titan_exp.extensions.replica_groups.groups import ReplicaGroups

    send = ReplicaGroups.send_tensors

    def dying(groups: ReplicaGroups, rank: int, description: Any, _: Any) -> None:
        send(groups, rank, description, [])
        die()

    ReplicaGroups.send_tensors = dying  # type: ignore[method-assign]


def run_with_death(fleet: Fleet, mutate: Mutation) -> tuple[Curve, int]:
    """Curve of two groups, and the number of the one that dies and is started again."""
    try:
        groups = fleet.start_all(mutate)
        dead = fleet.await_dead()
        groups[dead].kill()
        groups[dead] = fleet.start(dead, mutate)
        return fleet.curve(groups), dead
    finally:
        fleet.close()


def saved_groups(fleet: Fleet, step: int) -> set[str]:
    """Groups whose states a checkpoint has beside the writer's."""
    path = CheckpointFolder(fleet.folder.checkpoints).path_of(step)
    return {key.split(".")[1] for key in tensor_shapes(path) if key.startswith("group.")}


def test_a_death_while_saving_costs_no_step(tmp_path):
    words = [*SAVED, "checkpoint=async"]
    fleet = Fleet(tmp_path / "run", *words)
    found, dead = run_with_death(fleet, _DiesAround(_while_saving))
    assert [row["participants"] for row in found.rows[1::2]] == [2, 2, 1, 2]
    assert_same(found, reference(tmp_path / "reference", *words, absent={6: [dead]}))
    assert CheckpointFolder(fleet.folder.checkpoints).complete_steps()[-1] == 8
    assert saved_groups(fleet, 8) == {str(dead)}, "the other one is the oldest, which writes"


def _half_a_state_is_kept(die: Callable[[], None]) -> None:
    from titan_exp.extensions.replica_groups.groups import ReplicaGroups

    _while_sending(die)
    receive = ReplicaGroups.receive_tensors
    ReplicaGroups.receive_tensors = lambda groups, rank, prepare: receive(groups, rank, prepare) or True  # type: ignore[method-assign]


def test_half_a_kept_state_is_noticed(tmp_path):
    fleet = Fleet(tmp_path / "run", *SAVED)
    run_with_death(fleet, _DiesAround(_half_a_state_is_kept))
    assert saved_groups(fleet, 4) != set()


def test_a_checkpoint_is_without_the_state_of_a_group_that_died_over_it(tmp_path):
    fleet = Fleet(tmp_path / "run", *SAVED)
    found, dead = run_with_death(fleet, _DiesAround(_while_sending))
    assert [row["participants"] for row in found.rows[1::2]] == [2, 2, 1, 2]
    assert_same(found, reference(tmp_path / "reference", *SAVED, absent={6: [dead]}))
    assert CheckpointFolder(fleet.folder.checkpoints).complete_steps() == [4, 8]
    assert saved_groups(fleet, 4) == set()


class _DiesHealing(Dies):
    """Group 1 dies after step 4, and its second start within the transfer of the state; the third comes by step 8."""

    def __init__(self) -> None:
        super().__init__(4, "all_reduce")

    def __call__(self, group: ReplicaGroup) -> None:
        from titan_exp.extensions.replica_groups.groups import ReplicaGroups

        super().__call__(group)
        join = ReplicaGroups.join

        def joined(groups: ReplicaGroups, step: int, *position: int | None) -> Any:
            if step == 8:
                await_heartbeat(groups, 1, 3)
            return join(groups, step, *position)

        def dying(groups: ReplicaGroups, _: Any) -> None:
            assert groups.quorum is not None
            assert groups.quorum.source is not None
            peer = groups._client.order[groups.quorum.source]
            groups._client.process_group.recv([torch.zeros(1, dtype=torch.int64)], peer, 0).wait()
            os.kill(os.getpid(), signal.SIGKILL)

        ReplicaGroups.join = joined  # type: ignore[method-assign]
        if group.start == 2:
            ReplicaGroups.receive_state = dying  # type: ignore[method-assign]


def test_a_death_while_healing_costs_the_others_no_step(tmp_path):
    fleet, mutate = Fleet(tmp_path / "run", *LONG), _DiesHealing()
    try:
        first, *dead = fleet.start_all(mutate)
        for _ in range(2):
            fleet.await_death(dead[-1])
            dead.append(fleet.start(1, mutate))
        found = fleet.curve([first, dead[-1]])
    finally:
        fleet.close()
    away = [step for step in (2, 4, 6, 8, 10) if found.rows[step - 1]["participants"] == 1]
    assert away in ([4], [4, 6], [4, 6, 8]), "as soon as a start is in a quorum"
    assert_same(found, reference(tmp_path / "reference", *LONG, absent={step: [1] for step in away}))
