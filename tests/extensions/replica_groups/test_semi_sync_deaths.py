"""Groups of semi-synchronous training that die or stop: others lose no step, and a resumed run is bitwise the same."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extensions.replica_groups.fleet import Dies, Fleet, Mutation, await_heartbeat, wait_for
from tests.extensions.replica_groups.semi_sync_reference import reference
from tests.extensions.replica_groups.test_semi_sync import DILOCO, EXPERTS, PASSES, STREAMING, assert_same, train_groups
from tests.parity.runs import Curve
from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.checkpoint.storage_reader import tensor_shapes
from titan_exp.config.schema.typed_config import load_experiment
from titan_exp.extensions.replica_groups.events import ReplicaGroup, read_events
from titan_exp.extensions.replica_groups.lighthouse import TORCHFT, torchft_version
from titan_exp.plan.predict import predict
from titan_exp.tracking.run_folder.run_folder import RunFolder

pytestmark = pytest.mark.skipif(torchft_version() != TORCHFT, reason=f"needs torchft {TORCHFT}")
# With this seed no gradient is so near a cancellation that rounding changes its norm by more than 3e-6 (others: 1e-4).
LONG = [*DILOCO, "training.steps=10", "experiment.seed=1"]
STREAMED = [*STREAMING, "training.steps=12", "checkpoint=sync", "checkpoint.every=4"]
SAVED = [*DILOCO, "training.steps=8", "checkpoint=sync", "checkpoint.every=4"]


def curve_with_death(fleet: Fleet, mutate: Mutation) -> Curve:
    """Curve of two groups, of which group 1 dies and is started again."""
    try:
        survivor, dead = fleet.start_all(mutate)
        fleet.await_death(dead)
        return fleet.curve([survivor, fleet.start(1, mutate)])
    finally:
        fleet.close()


class _DiesTraining(Dies):
    """The first start of group 1 dies after its third step, between two synchronizations."""

    def __init__(self) -> None:
        super().__init__(4, "receive_state")

    def __call__(self, group: ReplicaGroup) -> None:
        from titan_exp.extensions.replica_groups.semi_sync import SemiSync

        super().__call__(group)
        add, steps = SemiSync.add_step, [0]

        def adding(sync: SemiSync, *arguments: Any, **named: Any) -> None:
            add(sync, *arguments, **named)
            steps[0] += 1
            if group.start == 1 and steps[0] == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        SemiSync.add_step = adding  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("mutate", "first"),
    [
        (Dies(4, "all_reduce"), 4),
        pytest.param(_DiesTraining(), 4, marks=pytest.mark.night),
        pytest.param(Dies(4, "commit"), 6, marks=pytest.mark.night),  # after the other has its sums
        pytest.param(Dies(4, "join"), 4, marks=pytest.mark.night),
    ],
    ids=["all-reduce", "training", "commit", "quorum"],
)
def test_the_others_lose_no_step(tmp_path, mutate, first):
    """Group 1 adds nothing to the `first` synchronization after its death, and heals at that or the next."""
    fleet = Fleet(tmp_path / "run", *LONG)
    found = curve_with_death(fleet, mutate)
    participants = [row["participants"] for row in found.rows]
    away = [step for step in (2, 4, 6, 8, 10) if participants[step - 1] == 1]
    assert away in ([first], [4, 6])
    assert participants[::2] == participants[1::2]
    assert_same(found, reference(tmp_path / "reference", *LONG, absent={step: [1] for step in away}))
    assert max(row["stall"] for row in found.rows) < 15
    assert [1] in [event["joined"] for event in read_events(fleet.folder) if event["event"] == "quorum"]


class _AllThatTrainedDie:
    """Group 1 dies after step 3 and heals from group 0 after step 4, which then dies before that synchronization."""

    def __call__(self, group: ReplicaGroup) -> None:
        from titan_exp.extensions.replica_groups.groups import ReplicaGroups
        from titan_exp.extensions.replica_groups.semi_sync import SemiSync

        add, join, send, apply = SemiSync.add_step, ReplicaGroups.join, ReplicaGroups.send_state, SemiSync.apply
        steps, sent = [0], list[bool]()

        def adding(sync: SemiSync, *arguments: Any, **named: Any) -> None:
            add(sync, *arguments, **named)
            steps[0] += 1
            if (group.number, group.start, steps[0]) == (1, 1, 3):
                os.kill(os.getpid(), signal.SIGKILL)

        def joined(groups: ReplicaGroups, step: int, *position: int | None) -> Any:
            waits_for = {(0, 4): 1, (1, 6): 0}.get((group.number, step))
            if waits_for is not None:
                await_heartbeat(groups, waits_for, 2)
            return join(groups, step, *position)

        def sending(groups: ReplicaGroups, *arguments: Any) -> None:
            send(groups, *arguments)
            sent.append(True)

        def applying(sync: SemiSync, step: int) -> Any:
            if (group.number, group.start, step) == (0, 0, 4):
                assert sent
                os.kill(os.getpid(), signal.SIGKILL)
            return apply(sync, step)

        SemiSync.add_step, SemiSync.apply = adding, applying  # type: ignore[method-assign]
        ReplicaGroups.join, ReplicaGroups.send_state = joined, sending  # type: ignore[method-assign]


def run_without_those_that_trained(path: Path, mutate: Mutation) -> Curve:
    fleet = Fleet(path, *LONG)
    try:
        groups = fleet.start_all(mutate)
        for number, rows in ((1, 0), (0, 4)):
            fleet.await_death(groups[number])
            fleet.wait_until(lambda rows=rows: len(fleet.lines()) >= rows)
            groups[number] = fleet.start(number, mutate)
        return fleet.curve(groups)
    finally:
        fleet.close()


def assert_tokens_of_batches(found: Curve, expected: Curve) -> None:
    """Nothing is averaged after step 4, and tokens are counted as in a run without a death."""
    assert [row["participants"] for row in found.rows[1::2]] == [2, 0, 1, 2, 2]
    assert [row["step"] for row in found.rows] == list(range(1, 11))
    assert [row["tokens"] for row in found.rows] == [row["tokens"] for row in expected.rows]


@pytest.mark.night
def test_tokens_are_those_of_the_batches_if_all_that_trained_them_die(tmp_path):
    found = run_without_those_that_trained(tmp_path / "run", _AllThatTrainedDie())
    assert_tokens_of_batches(found, train_groups(tmp_path / "whole", LONG))


class _ForgetsTokensOfTheRound(_AllThatTrainedDie):
    def __call__(self, group: ReplicaGroup) -> None:
        from titan_exp.extensions.replica_groups.semi_sync import SemiSync

        super().__call__(group)
        heal = SemiSync.heal
        SemiSync.heal = lambda sync, step, progress: heal(sync, step, {**progress, "round_tokens": 0})  # type: ignore[method-assign]


@pytest.mark.night
def test_forgotten_tokens_are_noticed(tmp_path):
    found = run_without_those_that_trained(tmp_path / "run", _ForgetsTokensOfTheRound())
    with pytest.raises(AssertionError):
        assert_tokens_of_batches(found, train_groups(tmp_path / "whole", LONG))


class _DiesInFlight:
    """The first start of group 1 dies after step 6, whose fragment it has sent after step 5. It comes back when the
    other joins after step `back`, which waits for it."""

    def __init__(self, back: int) -> None:
        self.back = back

    def __call__(self, group: ReplicaGroup) -> None:
        from titan_exp.extensions.replica_groups.groups import ReplicaGroups
        from titan_exp.extensions.replica_groups.semi_sync import SemiSync

        add, join, steps = SemiSync.add_step, ReplicaGroups.join, [0]

        def adding(sync: SemiSync, *arguments: Any, **named: Any) -> None:
            add(sync, *arguments, **named)
            steps[0] += 1
            if (group.number, group.start, steps[0]) == (1, 1, 6):
                os.kill(os.getpid(), signal.SIGKILL)

        def joined(groups: ReplicaGroups, step: int, *position: int | None) -> Any:
            asked = groups._folder.path / "asked"
            if group.start > 1:
                wait_for(asked)
            elif step == self.back:
                asked.touch()
                await_heartbeat(groups, 1, 2)
            return join(groups, step, *position)

        SemiSync.add_step, ReplicaGroups.join = adding, joined  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("back", "participants"),
    [
        (6, [2, 2, 1, 2, 2, 2]),  # it heals while the fragment is sent again, without its own pseudo-gradient
        pytest.param(7, [2, 2, 1, 1, 2, 2], marks=pytest.mark.night),  # and while the next one is sent
    ],
)
def test_a_death_with_a_fragment_in_flight_is_a_mean_over_the_others(tmp_path, back, participants):
    words = [*STREAMING, "training.steps=12"]
    found = curve_with_death(Fleet(tmp_path / "run", *words), _DiesInFlight(back))
    assert [row["participants"] for row in found.rows[1::2]] == participants
    assert_same(found, reference(tmp_path / "reference", *words, lost={1: (5, back)}))


class _SendsLate:
    """Group 1 starts its first sum after group 0 has trained another step."""

    def __call__(self, group: ReplicaGroup) -> None:
        from titan_exp.extensions.replica_groups.groups import ReplicaGroups
        from titan_exp.extensions.replica_groups.semi_sync import SemiSync

        add, start, steps = SemiSync.add_step, ReplicaGroups.start_all_reduce, [0]

        def adding(sync: SemiSync, *arguments: Any, **named: Any) -> None:
            add(sync, *arguments, **named)
            steps[0] += 1
            if (group.number, steps[0]) == (0, 2):
                (sync._groups._folder.path / "trained").touch()

        def starting(groups: ReplicaGroups, *arguments: Any) -> Any:
            if group.number == 1:
                wait_for(groups._folder.path / "trained", 10)
                assert (groups._folder.path / "trained").exists(), "group 0 waits for the sum"
            return start(groups, *arguments)

        SemiSync.add_step, ReplicaGroups.start_all_reduce = adding, starting  # type: ignore[method-assign]


def test_groups_train_while_a_fragment_is_in_flight(tmp_path):
    found = train_groups(tmp_path / "run", [*STREAMING, "training.steps=4"], _SendsLate())
    assert [row["participants"] for row in found.rows] == [2] * 4


def _waits_briefly(_: ReplicaGroup) -> None:
    from titan_exp.extensions.replica_groups import semi_sync

    semi_sync.NEWCOMER_LIMIT = 2.0


@pytest.mark.night
def test_training_begins_without_a_group_that_does_not_come(tmp_path):
    fleet = Fleet(tmp_path / "run", *DILOCO)
    try:
        found = fleet.curve([fleet.start(0, _waits_briefly)])
    finally:
        fleet.close()
    assert_same(found, reference(tmp_path / "reference", *DILOCO, absent={2: [1], 4: [1], 6: [1]}))
    assert {row["participants"] for row in found.rows} == {1}


def resumed(path: Path, *words: str, mutate: Mutation | None = None, saved: Sequence[str] = SAVED) -> Curve:
    """A run that ends after step 4 and continues from its checkpoint."""
    train_groups(path, [*saved, "training.stop_after=4"])
    return train_groups(path, [*saved, *words], mutate)


def assert_bitwise(found: Curve, expected: Curve) -> None:
    for name in ("step", "tokens", "loss", "grad_norm", "lr", "participants"):
        assert [row[name] for row in found.rows] == [row[name] for row in expected.rows], name
    assert found.disputed == expected.disputed == []
    assert all(torch.equal(found.weights[name], weight) for name, weight in expected.weights.items())


def _outer_state_is_lost(_: ReplicaGroup) -> None:
    from titan_exp.extensions.replica_groups.commits import SemiSyncCommit
    from titan_exp.extensions.replica_groups.outer_optimizer import MOMENTUM

    load = SemiSyncCommit._load_own_state

    def forgetful(commit: SemiSyncCommit) -> None:
        load(commit)
        outer = commit._outer
        torch._foreach_zero_(outer._state(MOMENTUM, outer.parameters()))

    SemiSyncCommit._load_own_state = forgetful  # type: ignore[method-assign]


def _stops_after_step_6(group: ReplicaGroup) -> None:
    """A stop is asked for after step 6, between two multiples of the interval."""
    from titan_exp.extensions.replica_groups.semi_sync import SemiSync

    add, steps = SemiSync.add_step, [0]

    def adding(sync: SemiSync, tokens: int, *, stop: bool, save: bool) -> None:
        steps[0] += 1
        add(sync, tokens, stop=stop or steps[0] == 5, save=save)

    SemiSync.add_step = adding  # type: ignore[method-assign]


@pytest.mark.night
def test_a_stop_waits_for_the_fragment_in_flight_only(tmp_path):
    expected, path = train_groups(tmp_path / "whole", STREAMED), tmp_path / "stopped"
    train_groups(path, STREAMED, _stops_after_step_6)
    assert CheckpointFolder(RunFolder(path).checkpoints).complete_steps()[-1] == 6
    assert_bitwise(train_groups(path, STREAMED), expected)


def _own_weights_are_lost(_: ReplicaGroup) -> None:
    """Every group continues with the outer optimizer's weights."""
    from titan_exp.extensions.replica_groups import commits

    load = commits.load_own_state
    commits.load_own_state = lambda *words, **_: load(*words, weights=False)


@pytest.mark.night
def test_lost_weights_of_groups_are_noticed(tmp_path):
    expected = train_groups(tmp_path / "whole", STREAMED)
    with pytest.raises(AssertionError):
        assert_bitwise(resumed(tmp_path / "resumed", mutate=_own_weights_are_lost, saved=STREAMED), expected)


def _own_state_is_lost(_: ReplicaGroup) -> None:
    from titan_exp.extensions.replica_groups import commits

    commits.load_own_state = lambda *_, **named: False


@pytest.mark.night
def test_a_resumed_run_has_every_state_of_its_groups(tmp_path):
    words = [*SAVED, "optimizer.name=tests.optim.own_states.Counting", "optimizer.lr=1e-3"]
    expected = train_groups(tmp_path / "whole", words)
    assert_bitwise(resumed(tmp_path / "resumed", saved=words), expected)


@pytest.mark.parametrize("words", [pytest.param(SAVED, marks=pytest.mark.night), STREAMED], ids=["diloco", "streaming"])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path, words):
    expected = train_groups(tmp_path / "whole", words)
    assert_bitwise(resumed(tmp_path / "resumed", saved=words), expected)
    folder = RunFolder(tmp_path / "whole")
    shapes = tensor_shapes(CheckpointFolder(folder.checkpoints).path_of(len(expected.rows))).items()
    saved = sum(4 * shape.numel() for key, shape in shapes if key.startswith(("model.", "optimizer.", "group.")))
    planned = predict(load_experiment(folder.config, trust=True), None).checkpoint_bytes
    assert saved == pytest.approx(planned, rel=1e-4)  # numbers of steps


@pytest.mark.night
@pytest.mark.parametrize(
    "words", [[*SAVED, *EXPERTS[len(DILOCO) :]], [*STREAMED, *PASSES]], ids=["experts", "pipeline"]
)
def test_resumed_pipelines_and_experts_are_bitwise(tmp_path, words):
    assert_bitwise(resumed(tmp_path / "resumed", saved=words), train_groups(tmp_path / "whole", words))


@pytest.mark.night
def test_a_group_with_experts_comes_back(tmp_path):
    words = [*LONG, *EXPERTS[len(DILOCO) :]]
    found = curve_with_death(Fleet(tmp_path / "run", *words), Dies(4, "all_reduce"))
    away = [step for step in (2, 4, 6, 8, 10) if found.rows[step - 1]["participants"] == 1]
    assert_same(found, reference(tmp_path / "reference", *words, absent={step: [1] for step in away}))


@pytest.mark.night
@pytest.mark.parametrize("mutate", [_outer_state_is_lost, _own_state_is_lost])
def test_a_lost_state_is_noticed(tmp_path, mutate):
    expected = train_groups(tmp_path / "whole", SAVED)
    with pytest.raises(AssertionError):
        assert_bitwise(resumed(tmp_path / "resumed", mutate=mutate), expected)


@pytest.mark.night
def test_a_run_resumed_in_another_layout_is_the_reference(tmp_path):
    found = resumed(tmp_path / "run", "parallelism.dp_shard=2")
    assert_same(found, reference(tmp_path / "reference", *SAVED))
