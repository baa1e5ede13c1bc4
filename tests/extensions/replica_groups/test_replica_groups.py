"""Replica groups: whatever dies, the curve is that of one device, and no step is lost or written twice."""

import json
import os
import signal
import time
import weakref
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.extensions.replica_groups.fleet import Dies, Fleet, Mutation
from tests.parity.runs import LINES, Curve, assert_same_curve, train
from titan_exp.config.errors.user_error import UserError
from titan_exp.extensions.replica_groups.events import ReplicaGroup, read_events
from titan_exp.extensions.replica_groups.lighthouse import TORCHFT, torchft_version

STEPS = 10
pytestmark = pytest.mark.skipif(torchft_version() != TORCHFT, reason=f"needs torchft {TORCHFT}")
# Three micro-batches for two groups; rows hold several documents, and ranks predict different numbers of tokens.
SETTINGS = [*LINES, f"training.steps={STEPS}", "training.global_batch_size=6", "training.micro_batch_size=2"]
SETTINGS += ["cluster.replica_groups=2"]
THREE = [*SETTINGS, "cluster.replica_groups=3"]
SHARDED = [*SETTINGS, "training.micro_batch_size=1", "parallelism.dp_shard=2"]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Curve]:
    return cache(lambda: train(tmp_path_factory.mktemp("one") / "run", *SETTINGS, "cluster.replica_groups=1"))


def run_with_death(
    path: Path, settings: list[str], mutate: Mutation, *, lighthouse: bool = False
) -> tuple[Curve, Fleet]:
    """Groups, of which group 1 dies and is started again; at that moment the lighthouse may die as well."""
    fleet = Fleet(path, *settings)
    try:
        first, dead, *others = fleet.start_all(mutate)
        fleet.await_death(dead)
        if lighthouse:
            fleet.lighthouse.close()
            time.sleep(1.0)  # between two starts
            fleet.lighthouse.poll()
        fleet.wait_until(lambda: len(fleet.lines()) >= 5)  # without the newcomer
        return fleet.curve([first, *others, fleet.start(1, mutate)]), fleet
    finally:
        fleet.close()


def assert_exact(found: Curve, fleet: Fleet, expected: Curve) -> None:
    assert_same_curve(found, expected)
    assert [json.loads(line)["step"] for line in fleet.lines()] == list(range(1, STEPS + 1))
    assert [row["lr"] for row in found.rows] == [row["lr"] for row in expected.rows]


@pytest.mark.parametrize(
    ("where", "settings", "lighthouse"),
    [
        pytest.param("sum_gradients", SETTINGS, False, marks=pytest.mark.night),
        pytest.param("sum_gradients", THREE, False, marks=pytest.mark.night),
        pytest.param("join", SETTINGS, False, marks=pytest.mark.night),
        pytest.param("commit", SETTINGS, False, marks=pytest.mark.night),
        pytest.param("sum_gradients", SETTINGS, True, marks=pytest.mark.night),
        pytest.param("sum_gradients", SHARDED, False, marks=pytest.mark.night),
        pytest.param("commit", SHARDED, True, marks=pytest.mark.night),
    ],
)
def test_a_death_leaves_the_curve_of_one_device(tmp_path, one_device, where, settings, lighthouse):
    found, fleet = run_with_death(tmp_path / "run", settings, Dies(3, where), lighthouse=lighthouse)
    assert_exact(found, fleet, one_device())
    participants, groups = [row["participants"] for row in found.rows], fleet.experiment.cluster.worlds
    assert participants[4] == groups - 1
    assert participants[-1] == groups, "the newcomer healed and took its share"
    assert max(row["stall"] for row in found.rows) < 10, "no collective ran into its time-out of 20 s"
    events = [event for event in read_events(fleet.folder) if event["event"] == "quorum"]
    assert [1] in [event["joined"] for event in events]


def with_death_and_alone(path: Path, settings: list[str]) -> tuple[Curve, Curve]:
    """Curves of two groups, one of which dies, and of one device: equal to rounding."""
    alone = [word for word in settings if not word.startswith(("parallelism.", "cluster."))]
    found, fleet = run_with_death(path / "run", settings, Dies(3, "sum_gradients"))
    expected = train(path / "one", *alone)
    assert_exact(found, fleet, expected)
    assert {1, 2} == {row["participants"] for row in found.rows}
    return found, expected


def test_a_failed_collective_releases_its_connections():
    """Frames of the exception have them as locals, and other groups would wait at what is still open."""
    from titan_exp.extensions.replica_groups.groups import ReplicaGroups

    client = SimpleNamespace(process_group=Event(), disconnect=lambda: setattr(client, "process_group", None))
    groups, connections = ReplicaGroups.__new__(ReplicaGroups), weakref.ref(client.process_group)
    groups.__dict__ |= {"_client": client, "_error": None}

    def fail() -> None:
        group = client.process_group
        raise RuntimeError(f"lost {group}")

    groups._attempt(fail)
    assert groups._error is not None
    assert connections() is None


SPLIT = ["training.global_batch_size=12", "training.micro_batch_size=1"]
PIPELINE = [*SETTINGS, *SPLIT, "model.layers=4", "parallelism.pp=2", "parallelism.pp_microbatches=4"]
# Both copies of the embedding are on the first rank.
TIED = [*PIPELINE, "parallelism.pp_schedule=ZBVZeroBubble", "model.tied_embeddings=true"]
EXPERTS = [*SETTINGS, "model=deepseek_debug"]
# Numbers, lists and a late tensor of its state, and counts of its group.
OWN = [*SETTINGS, "optimizer.name=tests.optim.own_states.Counting", "optimizer.lr=1e-3"]


@pytest.mark.parametrize(
    "settings",
    [
        EXPERTS,
        OWN,
        pytest.param(PIPELINE, marks=pytest.mark.night),
        pytest.param([*PIPELINE, "parallelism.pp_schedule=Interleaved1F1B"], marks=pytest.mark.night),
        pytest.param(TIED, marks=pytest.mark.night),
        pytest.param([*EXPERTS, *SPLIT, "parallelism.dp_shard=2", "parallelism.ep=2"], marks=pytest.mark.night),
        pytest.param([*EXPERTS, *PIPELINE[len(SETTINGS) :]], marks=pytest.mark.night),
        pytest.param([*SETTINGS, "model=qwen3_moe_debug", "parallelism.tp=2"], marks=pytest.mark.night),
    ],
    ids=lambda settings: " ".join(settings[len(SETTINGS) :]),
)
def test_pipelines_and_experts_survive_a_death(tmp_path, settings):
    """Passes of a pipeline are divided, tokens of experts counted once and recorded once, and router biases healed."""
    found, expected = with_death_and_alone(tmp_path, settings)
    if expected.rows[0].get("experts/load_max"):
        records = [(tmp_path / name / "expert_load.jsonl").read_text().splitlines() for name in ("run", "one")]
        steps, alone = ([json.loads(line)["step"] for line in record] for record in records)
        assert steps == alone == list(range(1, STEPS + 1))
    loads = [key for key in expected.rows[0] if key.endswith(("load_max", "entropy", "bias_range"))]
    for found_row, row in zip(found.rows, expected.rows, strict=True):
        assert [found_row[key] for key in loads] == pytest.approx([row[key] for key in loads], rel=1e-3)


QK_CLIP = [*SETTINGS, "optimizer=muon", "optimizer.lr=2e-3", "optimizer.eps=1e-4", "optimizer.qk_clip=0.1"]
OWN_OBJECTIVE = [*SETTINGS, "training.objective=tests.trainer.own_objective.LogitStatistics"]
OWN_MODEL = [*SETTINGS, "model.architecture=tests.trainer.own_statistics"]


@pytest.mark.parametrize(
    "settings",
    [
        QK_CLIP,
        pytest.param([*QK_CLIP, "model=deepseek_debug", *SHARDED[len(SETTINGS) :]], marks=pytest.mark.night),
        pytest.param([*QK_CLIP, *PIPELINE[len(SETTINGS) :]], marks=pytest.mark.night),
        pytest.param(OWN_OBJECTIVE, marks=pytest.mark.night),
        pytest.param(OWN_MODEL, marks=pytest.mark.night),
        pytest.param([*OWN_MODEL, *PIPELINE[len(SETTINGS) :]], marks=pytest.mark.night),
    ],
    ids=lambda settings: " ".join(settings[len(SETTINGS) :]),
)
def test_numbers_beside_gradients_survive_a_death(tmp_path, settings):
    """Largest logits, on which the update depends, and metrics of objectives and modules are those of all groups."""
    found, expected = with_death_and_alone(tmp_path, settings)
    reported = [key for key in expected.rows[0] if key.startswith(("model/", "objective/logit"))]
    assert reported
    for found_row, row in zip(found.rows, expected.rows, strict=True):
        assert [found_row[key] for key in reported] == pytest.approx([row[key] for key in reported], rel=1e-4)


def _groups_clip_by_their_own_logits(_: ReplicaGroup) -> None:
    from titan_exp.extensions.replica_groups.groups import ReplicaGroups

    ReplicaGroups.reduce_maxima = lambda groups, tensors: None  # type: ignore[method-assign]


@pytest.mark.night
def test_own_logits_are_noticed(tmp_path):
    found, fleet = run_with_death(tmp_path / "run", QK_CLIP, _Both(_groups_clip_by_their_own_logits))
    with pytest.raises(AssertionError):
        assert_exact(found, fleet, train(tmp_path / "one", *QK_CLIP, "cluster.replica_groups=1"))


def replay(path: Path, recorded: Path) -> Curve:
    """The same groups without a death, by the history of another run."""
    fleet = Fleet(path, *SETTINGS, f"cluster.group_history={recorded}")
    try:
        return fleet.curve(fleet.start_all())
    finally:
        fleet.close()


def assert_bitwise(found: Curve, expected: Curve) -> None:
    for name in ("step", "tokens", "loss", "grad_norm", "lr"):
        assert [row[name] for row in found.rows] == [row[name] for row in expected.rows], name
    assert found.disputed == expected.disputed == []
    assert all(torch.equal(found.weights[name], weight) for name, weight in expected.weights.items())


def test_a_replay_of_the_history_is_bitwise(tmp_path):
    expected, fleet = run_with_death(tmp_path / "recorded", SETTINGS, Dies(3, "sum_gradients"))
    assert {row["participants"] for row in expected.rows} == {1, 2}
    assert_bitwise(replay(tmp_path / "replay", fleet.folder.path), expected)
    path = fleet.folder.path / "groups.jsonl"
    lines = path.read_text().splitlines()
    path.write_text(f"{lines[0]}\n")  # a history without the death
    with pytest.raises(AssertionError):
        assert_bitwise(replay(tmp_path / "other", fleet.folder.path), expected)


def _divides_by_participants(_: ReplicaGroup) -> None:
    from titan_exp.extensions.replica_groups.groups import ReplicaGroups

    all_reduce = ReplicaGroups._all_reduce

    def averaged(groups: ReplicaGroups, tensor: torch.Tensor) -> None:
        all_reduce(groups, tensor)
        tensor.div_(groups.size)

    ReplicaGroups._all_reduce = averaged  # type: ignore[method-assign]


def _counts_before_it_heals(_: ReplicaGroup) -> None:
    from titan_exp.extensions.replica_groups.groups import ReplicaGroups

    receive = ReplicaGroups.receive_state
    ReplicaGroups.receive_state = lambda groups, prepare: receive(  # type: ignore[method-assign]
        groups, lambda progress: [part.clone() for part in prepare(progress)]
    )


def _writes_before_the_commit(_: ReplicaGroup) -> None:
    from titan_exp.extensions.replica_groups.groups import ReplicaGroups

    commit = ReplicaGroups.commit

    def early(groups: ReplicaGroups, step: int) -> bool:
        if groups.leads:
            with groups._folder.metrics.open("a") as file:
                numbers = dict.fromkeys(("loss", "grad_norm", "tokens", "lr"), 0)
                file.write(json.dumps({"step": step, "attempt": 1, **numbers}) + "\n")
        return commit(groups, step)

    ReplicaGroups.commit = early  # type: ignore[method-assign]


def _commits_what_failed(_: ReplicaGroup) -> None:
    from titan_exp.extensions.replica_groups.quorum import QuorumClient

    vote = QuorumClient.vote
    QuorumClient.vote = lambda client, step, ready: vote(client, step, True)  # type: ignore[method-assign]


@pytest.mark.night
@pytest.mark.parametrize(
    "mutate", [_divides_by_participants, _counts_before_it_heals, _writes_before_the_commit, _commits_what_failed]
)
def test_a_mutation_is_noticed(tmp_path, one_device, mutate):
    found, fleet = run_with_death(tmp_path / "run", SETTINGS, _Both(mutate))
    with pytest.raises(AssertionError):
        assert_exact(found, fleet, one_device())


def _forgets_tokens_of_experts(_: ReplicaGroup) -> None:
    from titan_exp.trainer.experts import ExpertLoad

    ExpertLoad.step_sums = property(lambda load: [router.losses for router in load._routers.values()])  # type: ignore[method-assign,assignment]


@pytest.mark.night
def test_forgotten_tokens_of_experts_are_noticed(tmp_path):
    found, fleet = run_with_death(tmp_path / "run", EXPERTS, _Both(_forgets_tokens_of_experts))
    expected = train(tmp_path / "one", *EXPERTS, "cluster.replica_groups=1")
    with pytest.raises(AssertionError):
        assert_exact(found, fleet, expected)


def _heals_one_copy_of_tied_weights(_: ReplicaGroup) -> None:
    from titan_exp.extensions.replica_groups import commits

    commits.sync_tied_state = lambda *_: None  # type: ignore[assignment]


@pytest.mark.night
def test_one_healed_copy_of_tied_weights_is_noticed(tmp_path):
    found, fleet = run_with_death(tmp_path / "run", TIED, _Both(_heals_one_copy_of_tied_weights))
    alone = [word for word in TIED if not word.startswith(("parallelism.", "cluster."))]
    with pytest.raises(AssertionError):
        assert_exact(found, fleet, train(tmp_path / "one", *alone))


class _Both:
    def __init__(self, mutate: Mutation) -> None:
        self.mutate = mutate

    def __call__(self, group: ReplicaGroup) -> None:
        Dies(3, "sum_gradients")(group)
        self.mutate(group)


def _gives_up_early(_: ReplicaGroup) -> None:
    from titan_exp.extensions.replica_groups import groups as replica_groups

    replica_groups.NEWCOMER_LIMIT = 2.0


def _knows_no_step(group: ReplicaGroup) -> None:
    from titan_exp.extensions.replica_groups import groups as replica_groups

    _gives_up_early(group)
    replica_groups.known_step = lambda _: 0


def start_alone(path: Path, mutate: Mutation) -> Fleet:
    """A group that comes back to a run after step 5, whose other group is gone."""
    fleet = Fleet(path, *SETTINGS)
    fleet.folder.beat(5)
    try:
        fleet.results(fleet.start(1, mutate))
        return fleet
    finally:
        fleet.close()


def test_a_newcomer_never_starts_alone(tmp_path):
    with pytest.raises(AssertionError, match=r"the run is after step 5\. In 2 s no living group offered its state"):
        start_alone(tmp_path / "run", _gives_up_early)


def test_a_part_of_a_state_trains_nowhere(tmp_path, monkeypatch):
    """Nobody is left to heal from: the refusal names what the run knows."""
    from titan_exp.extensions.replica_groups import groups as replica_groups
    from titan_exp.extensions.replica_groups.config import cluster_of
    from titan_exp.extensions.replica_groups.quorum import Quorum

    run = Fleet(tmp_path / "run", *SETTINGS)
    run.close()
    run.folder.beat(5)
    alone = Quorum(1, ("0-1-1",), 0, 5, None, (), 0.0, 1)
    groups = replica_groups.ReplicaGroups(ReplicaGroup(1, 1, ""), cluster_of(run.experiment), Mock(), run.folder)
    groups.quorum, groups._has_state = alone, False
    groups.__dict__["_client"] = Mock(**{"ask.return_value": (alone, None)})
    monkeypatch.setattr(groups, "_from_first_rank", lambda value: value)
    monkeypatch.setattr(replica_groups, "NEWCOMER_LIMIT", 0.1)
    with pytest.raises(UserError, match=r"has a part of another group's state, and the run is after step 5\. In 0 s"):
        groups.join(3)


@pytest.mark.night
def test_a_newcomer_that_starts_alone_is_noticed(tmp_path):
    assert len(start_alone(tmp_path / "run", _knows_no_step).lines()) == STEPS


class _Stops:
    """Group 0 stops as a whole before the step after 3, and group 1 before that after 6. Later, group 0 says when a
    lighthouse has given it a quorum alone. The clock of every second rank runs a thousand times too fast."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, group: ReplicaGroup) -> None:
        from titan_exp.extensions.replica_groups import groups as replica_groups
        from titan_exp.extensions.replica_groups.groups import ReplicaGroups
        from titan_exp.extensions.replica_groups.quorum import QuorumClient

        join, ask, stopped, rank = ReplicaGroups.join, QuorumClient.ask, list[bool](), int(os.environ["RANK"])
        (self.folder / f"pid-{group.number}-{rank}").write_text(str(os.getpid()))
        if rank == 1:
            monotonic = time.monotonic
            replica_groups.time = SimpleNamespace(monotonic=lambda: 1000 * monotonic(), sleep=time.sleep)  # type: ignore[assignment]

        def joined(groups: ReplicaGroups, step: int, position: int | None = None) -> Any:
            if step == (3, 6)[group.number] and not stopped:
                stopped.append(True)
                (self.folder / f"stopped-{group.number}-{rank}").touch()
                os.kill(os.getpid(), signal.SIGSTOP)
            return join(groups, step, position)

        def asked(client: QuorumClient, step: int) -> Any:
            found = ask(client, step)
            if stopped and group.number == 0 and found[0].size == 1:
                (self.folder / "alone").touch()
            return found

        ReplicaGroups.join, QuorumClient.ask = joined, asked  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("settings", "ranks"), [(SETTINGS, 1), pytest.param(SHARDED, 2, marks=pytest.mark.night)], ids=["one", "two ranks"]
)
def test_a_lighthouse_that_forgot_the_others_divides_no_run(tmp_path, one_device, settings, ranks):
    """A step is trained once, if another group has trained it and the next lighthouse does not know that group yet."""
    path = tmp_path / "run"
    fleet = Fleet(path, *settings)
    try:
        groups = fleet.start_all(_Stops(path))
        for number, rank in product(range(2), range(ranks)):
            fleet.wait_until((path / f"stopped-{number}-{rank}").exists)
        first, other = ([int((path / f"pid-{n}-{rank}").read_text()) for rank in range(ranks)] for n in range(2))
        fleet.lighthouse.close()
        time.sleep(1.0)  # between two starts
        fleet.lighthouse.poll()
        for pid in first:
            os.kill(pid, signal.SIGCONT)
        fleet.wait_until((path / "alone").exists)
        for pid in other:
            os.kill(pid, signal.SIGCONT)
        assert_exact(fleet.curve(groups), fleet, one_device())
    finally:
        fleet.close()


@pytest.mark.night
def test_training_waits_for_min_groups(tmp_path):
    fleet = Fleet(tmp_path / "run", *SETTINGS, "cluster.min_groups=2")
    try:
        first = fleet.start(0)
        time.sleep(8)
        assert not fleet.lines()
        curve = fleet.curve([first, fleet.start(1)])
        assert {row["participants"] for row in curve.rows} == {2}
    finally:
        fleet.close()
