"""Replica groups as jobs: script, status, and the epilogue, which requeues a group alone while another lives."""

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.launch.slurm.test_epilogue import GLOO, START, USER, VALUE
from tests.launch.slurm.test_script import planned, script
from tests.launch.test_rank_main import make_run
from titan_exp.extensions.replica_groups import launch_slurm
from titan_exp.extensions.replica_groups.agents import LifeSign, read_name
from titan_exp.extensions.replica_groups.events import read_events, record_event
from titan_exp.extensions.replica_groups.launch_slurm import epilogue, failed_starts, leave
from titan_exp.launch.rank.rank_env import GROUP, TOKEN, RankError, RankRecord, write_record
from titan_exp.launch.slurm import executor
from titan_exp.launch.slurm.script import render, sbatch_options
from titan_exp.launch.slurm.squeue import Job
from titan_exp.launch.slurm.submit import group_by_resources
from titan_exp.tracking.run_folder.run_folder import HUNG, RunFolder, World

GOLDEN = Path(__file__).parent / "golden"
CPU = ["cluster=slurm", "cluster.device=cpu"]


def test_golden_text(golden: Callable[[Path, str], None]):
    one = script(*CPU, "cluster.replica_groups=3")
    golden(GOLDEN / "job.sh", render(replace(one, worlds=(0, 2))))
    bash = subprocess.run(["bash", "-n", str(GOLDEN / "job.sh")], capture_output=True, text=True, check=False)
    assert bash.stderr == ""


def test_a_group_asks_for_its_own_gpus():
    words = ["cluster=slurm", "cluster.gpus_per_node=4", "cluster.replica_groups=3", "parallelism.dp_shard=8"]
    options = dict(sbatch_options(replace(script(*words), worlds=(0, 1, 2))))
    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-node"]) == (2, 4, "4")
    assert options["array"] == "0,1,2"


def test_an_array_has_the_groups_of_one_run():
    runs = [replace(planned(*CPU, "cluster.replica_groups=2"), run_id=run_id) for run_id in ("a", "b")]
    assert group_by_resources(runs) == [[runs[0]], [runs[1]]]


def test_status_of_the_jobs_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = RunFolder(tmp_path)
    folder.add_attempt(world_size=2, hosts=(), launched_by="slurm", token="abc", job_id="7", start=1.0)
    jobs = [
        Job("7_0", "RUNNING", "None", "abc_0"),
        Job("7_1", "FAILED", "None", "abc_1"),
        Job("9_1", "PENDING", "Resources", "abc_1"),
        Job("8_0", "RUNNING", "None", "abcd_0"),
    ]
    monkeypatch.setattr(executor, "listed_jobs", lambda _: jobs)
    found = executor.SlurmExecutor("slurm").status([folder])[tmp_path]
    assert (found.state, found.job_id) == ("running", "7,9")
    assert found.reason == "replica group 1 pending: Resources"
    assert found.jobs == {"7_0": "running", "9_1": "queued"}


class Fleet:
    """Two groups, of which 0 has ended and 1 lives, in a run whose job is 12."""

    def __init__(self, folder: RunFolder, queue: list[Job]) -> None:
        self.folder, self.queue = folder, queue
        self.restarts = 0

    def start(self, number: int, *, agent: int = 0) -> None:
        count = sum(event["event"] == "started" for event in read_events(self.folder))
        restarts = self.restarts if number == 0 else 0
        record_event(
            self.folder, 1, event="started", group=number, start=count, job_id=f"12_{number}", restarts=restarts,
            host="127.0.0.1", agent=agent, lighthouse="", loader=0,
        )  # fmt: skip

    def train(self, *groups: int) -> None:
        record_event(self.folder, 1, event="quorum", groups=list(groups), joined=[], step=0, quorum=1)

    def end(self, error: RankError | None = VALUE, *, code: int = 1) -> int:
        """End the newest start of group 0, whose only rank ended by `error`, or was killed without one."""
        start = [event for event in read_events(self.folder) if event["event"] == "started" and event["group"] == 0][-1]
        view = self.folder.with_world(World(0, start["start"]).logs)
        record = RankRecord(0, 100, "node1", 1.0)
        if error is not None:
            record = replace(record, end=2.0, exit=2 if error.user else code, error=error)
        elif code in (0, 85):
            record, code = replace(record, end=2.0, exit=code), 0
        write_record(view, 1, record)
        return epilogue([str(self.folder.path), "12_0", str(code)])

    @property
    def state(self) -> str:
        state = self.folder.read_state()
        assert state is not None
        return state.state

    @property
    def ends(self) -> list[int | None]:
        return [row.exit for row in self.folder.read_attempts()]


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    folder = make_run(tmp_path, "cluster=slurm", "cluster.device=cpu", "cluster.replica_groups=2")
    folder.add_attempt(world_size=2, hosts=(), token="feed", job_id="12", launched_by="slurm")
    folder.update_attempt(1, start=1.0, checkpoint=0)
    folder.logs.mkdir(exist_ok=True)
    (folder.logs / "slurm-12_0.out").write_text(START)
    for name, value in ((TOKEN, "feed"), (GROUP, "0"), ("SLURM_RESTART_COUNT", "0")):
        monkeypatch.setenv(name, value)
    queue: list[Job] = []
    monkeypatch.setattr(launch_slurm, "listed_jobs", lambda _: queue)
    made = Fleet(folder, queue)
    made.start(0)
    return made


def alive(fleet: Fleet) -> None:
    """Group 1 trains with group 0."""
    name = World(1, 1).logs
    fleet.start(1, agent=LifeSign(0, name).port)
    fleet.train(0, 1)


@pytest.mark.parametrize("error", [VALUE, GLOO, None], ids=["raised", "broken collective", "killed"])
def test_a_group_that_fails_is_requeued_alone(fleet: Fleet, error: RankError | None, capsys):
    alive(fleet)
    assert fleet.end(error) == 85
    assert fleet.ends == [None]  # the run's attempt goes on
    assert fleet.state != "failed"
    assert "requeued alone, while groups 1 train on" in capsys.readouterr().out


def test_mutation_of_the_living_groups_is_noticed(fleet: Fleet, monkeypatch: pytest.MonkeyPatch):
    """An epilogue that takes its group for the whole run closes the attempt."""
    alive(fleet)
    monkeypatch.setattr(launch_slurm, "living_groups", lambda *_, **__: set())
    assert fleet.end() == 1
    assert fleet.ends == [1]


def test_the_last_group_closes_the_attempt(fleet: Fleet, monkeypatch: pytest.MonkeyPatch):
    """Group 1 has trained and answers no longer; a group that waits in the queue has no state to train from."""
    fleet.start(1, agent=9)
    fleet.train(0, 1)
    fleet.queue.append(Job("12_1", "PENDING", "Resources", "feed_1"))
    cancelled: list[str] = []
    monkeypatch.setattr(launch_slurm, "ask", lambda *words: cancelled.extend(words))
    assert fleet.end() == 1
    assert fleet.ends == [1]
    assert fleet.folder.read_attempts()[0].reason == "replica group 0, rank 0: ValueError: the loss went for a walk"
    assert cancelled == ["scancel", "12_1"]


def test_before_the_first_step_a_group_in_the_queue_counts(fleet: Fleet):
    fleet.queue.append(Job("12_1", "PENDING", "Resources", "feed_1"))
    assert fleet.end() == 85
    assert fleet.ends == [None]


def test_a_group_that_stays_away_does_not_count(fleet: Fleet):
    """SLURM may list its job as completing for a while."""
    fleet.queue.append(Job("12_1", "COMPLETING", "None", "feed_1"))
    record_event(fleet.folder, 1, event=launch_slurm.AWAY, group=1, reason="a test")
    assert fleet.end(USER) == 2
    assert fleet.ends == [2]


def test_the_group_that_loads_the_checkpoint_is_needed(fleet: Fleet, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch_slurm, "newest_checkpoint", lambda _: 100)
    fleet.start(1, agent=LifeSign(0, World(1, 1).logs).port)
    assert fleet.end(USER) == 2
    assert fleet.ends == [2]
    reason = fleet.folder.read_attempts()[0].reason or ""
    assert reason.endswith("it should have loaded the run's checkpoint for all groups")


def test_a_start_of_another_process_at_the_same_port_does_not_live(fleet: Fleet):
    fleet.start(1, agent=LifeSign(0, "group-01-start-007").port)
    fleet.train(0, 1)
    assert fleet.end() == 1
    assert fleet.ends == [1]


def test_an_error_of_the_user_keeps_its_group_away(fleet: Fleet):
    alive(fleet)
    assert fleet.end(USER) == 2
    assert fleet.ends == [None]
    assert read_events(fleet.folder)[-1]["event"] == "stays away"


def test_max_requeues_counts_starts_of_one_group_without_a_step(fleet: Fleet, monkeypatch: pytest.MonkeyPatch):
    alive(fleet)
    monkeypatch.setattr(launch_slurm, "load_experiment", changed(launch_slurm.load_experiment, max_requeues=1))
    codes = [fleet.end()]  # it has trained, which does not count
    for restarts in (1, 2):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        fleet.restarts = restarts
        fleet.start(0)
        codes.append(fleet.end())
    assert codes == [85, 85, 1]
    assert fleet.ends == [None]


@pytest.mark.parametrize(("code", "failures"), [(1, 0), (HUNG, 1)])
def test_a_start_that_trained_counts_if_it_hung(fleet: Fleet, code: int, failures: int):
    start = next(event for event in read_events(fleet.folder) if event["event"] == "started" and event["group"] == 0)
    fleet.train(0, 1)
    record_event(fleet.folder, 1, event="ended", group=0, start=start["start"], exit=code, reason="")
    assert failed_starts(read_events(fleet.folder, 1), 0) == failures


def test_too_few_groups_are_left(fleet: Fleet, monkeypatch: pytest.MonkeyPatch):
    alive(fleet)
    monkeypatch.setattr(launch_slurm, "load_experiment", changed(launch_slurm.load_experiment, min_groups=2))
    assert fleet.end(USER) == 2
    assert fleet.ends == [2]
    assert "fewer groups are left than cluster.min_groups=2" in (fleet.folder.read_attempts()[0].reason or "")


@pytest.mark.parametrize(
    ("stop", "code", "ends"), [("SLURM is about to end the job", 85, [85, None]), ("cancelled: by a test", 130, [85])]
)
def test_a_stop_closes_the_attempt_once(fleet: Fleet, monkeypatch: pytest.MonkeyPatch, stop, code, ends):
    """All groups are requeued for one new attempt, or none."""
    alive(fleet)
    fleet.folder.request_stop(stop)
    assert fleet.end(None, code=85) == code
    monkeypatch.setenv(GROUP, "1")
    view = fleet.folder.with_world(World(1, 1).logs)
    write_record(view, 1, RankRecord(0, 100, "node2", 1.0, end=2.0, exit=85))
    assert epilogue([str(fleet.folder.path), "12_1", "0"]) == code
    assert fleet.ends == ends
    assert {row.token for row in fleet.folder.read_attempts()} == {"feed"}


def test_done(fleet: Fleet):
    alive(fleet)
    assert fleet.end(None, code=0) == 0
    assert fleet.ends == [0]
    assert fleet.state == "done"


def test_of_all_groups_at_their_time_limit_one_saves(fleet: Fleet, monkeypatch: pytest.MonkeyPatch):
    alive(fleet)
    path = [str(fleet.folder.path)]
    assert leave(path) == 0  # group 1 trains on
    monkeypatch.setenv(GROUP, "1")
    lives = LifeSign(0, World(0, 0).logs)
    monkeypatch.setattr(launch_slurm, "read_name", lambda *_: read_name("127.0.0.1", lives.port))
    assert leave(path) == 1  # group 0 is still there, and leaves
    fleet.start(0, agent=lives.port)
    fleet.train(1, 0)
    monkeypatch.setattr(launch_slurm, "read_name", lambda *_: World(0, 2).logs)
    assert leave(path) == 0  # it is back
    fleet.start(1)
    fleet.folder.request_stop("cancelled")
    assert leave(path) == 1


def changed(load, **fields):
    def loaded(*words, **options):
        experiment = load(*words, **options)
        return replace(experiment, cluster=replace(experiment.cluster, **fields))

    return loaded
