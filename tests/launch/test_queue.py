"""The queue of the guide: a folder of scripts, and a worker that runs one after the other."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Never

import pytest

from tests.launch.fleet import PACKAGE, Fleet
from tests.launch.launching import REPOSITORY, wait_until
from tests.launch.test_rank_main import make_run
from titan_exp.cli.main import main
from titan_exp.launch.executor import executor_for
from titan_exp.launch.rank import host_agent
from titan_exp.launch.rank.host_agent import join_attempt
from titan_exp.launch.rank.rank_env import RankInfo
from titan_exp.launch.run_status import run_status

KIND = "my_package.spool.SpoolExecutor"


class Spool(Fleet):
    """Runs that a worker starts."""

    def work(self, fake: str = "") -> None:
        if fake:
            self.set("TITAN_EXP_RANK_MAIN", f"tests.launch.fake_ranks.{fake}")
        command = [sys.executable, "-m", "my_package.spool", str(self.home / "queue")]
        path = os.pathsep.join([str(PACKAGE), str(REPOSITORY)])
        self.worker = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, start_new_session=True)

    def ended(self, state: str) -> None:
        """Wait until the worker has run a job, whose run has ended so."""
        wait_until(lambda: any((self.home / "queue").glob("*.ended")), limit=120)
        self.wait(state)


@pytest.fixture
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spool]:
    options = [f"cluster.options.folder={tmp_path}/queue", "cluster.gpus_per_node=null"]
    fleet = Spool(tmp_path, monkeypatch, "cluster=spool", *options)
    yield fleet
    if hasattr(fleet, "worker"):
        fleet.worker.kill()
        fleet.worker.wait()
    for process in fleet.processes():
        process.kill()


def test_jobs_are_queued_once_dequeued_and_run(spool: Spool, capsys: pytest.CaptureFixture[str]):
    words = ["training.steps=2", "training.seq_len=64", "evaluation.every=0", "training.global_batch_size=4"]
    folder = spool.train(*words)
    job = run_status(folder).job_id
    assert (run_status(folder).state, [path.stem for path in (spool.home / "queue").iterdir()]) == ("queued", [job])
    spool.train(*words)
    assert f"queued job {job}" in capsys.readouterr().out
    assert main(["cancel", str(folder.path)]) == 0
    assert f"job {job}: taken out of the queue" in capsys.readouterr().out
    assert (run_status(folder).state, run_status(folder).reason) == ("preempted", "titan-exp cancel")
    spool.train(*words, "cluster.options.priority=7")
    spool.work()
    spool.ended("done")
    first, second = folder.read_attempts()
    assert (first.start, second.exit, second.world_size) == (None, 0, 2)
    assert (second.job_id or "").startswith("07-")


def test_the_cause_is_the_killed_rank_and_retry_queues_it_again(spool: Spool):
    spool.work("killed_on_rank_1")
    folder = spool.train()
    spool.ended("failed")
    assert "a signal killed rank 1" in (run_status(folder).reason or "")
    assert main(["retry", str(folder.path)]) == 0


def test_a_run_is_asked_to_save_whatever_the_queue_says(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    spool.work("obey_stop")
    folder = spool.train()
    wait_until(lambda: all((folder.path / f"seen-{rank}.json").exists() for rank in (0, 1)), limit=120)
    (job,) = (spool.home / "queue").glob("*.running")
    job.rename(job.with_suffix(".forgotten"))
    assert run_status(folder).state == "running"
    assert main(["cancel", str(folder.path)]) == 0
    assert "asked to save and stop" in capsys.readouterr().out
    spool.wait("preempted")
    executor = executor_for(KIND)
    with monkeypatch.context() as silent:
        silence(silent)
        assert executor.status([folder])[folder.path].state == "gone"  # as its attempt has ended
    spool.worker.kill()
    spool.worker.wait()
    spool.train()
    silence(monkeypatch)
    assert executor.status([folder])[folder.path].state == "unknown"
    assert main(["cancel", str(folder.path)]) == 2
    assert "queue does not answer: no route to the queue" in capsys.readouterr().out
    spool.train(code=2)


def silence(monkeypatch: pytest.MonkeyPatch) -> None:
    def jobs(*_: object) -> Never:
        raise OSError("no route to the queue")

    monkeypatch.setattr(type(executor_for(KIND)), "jobs", jobs)


def test_nothing_is_left_behind_for_a_silent_queue(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    silence(monkeypatch)
    assert main(spool.words) == 2
    assert "the queue does not answer, so we submit nothing: no route to the queue" in capsys.readouterr().err
    assert not (spool.home / "runs").exists()


def test_a_refused_job_leaves_the_run_as_it_was(spool: Spool, capsys: pytest.CaptureFixture[str]):
    (spool.home / "queue").touch()
    folder = spool.train(code=2)
    assert "refused" in capsys.readouterr().err
    assert folder.read_attempts()[0].start is None
    assert "not submitted: " in (run_status(folder).reason or "")
    # A job that exists all the same starts nothing.
    assert host_agent.main([str(folder.path), "1", "0"]) == 0


def test_an_attempt_has_the_job_of_its_submission(tmp_path: Path):
    folder = make_run(tmp_path)
    folder.add_attempt(world_size=1, hosts=(), launched_by=KIND, token="abc", job_id="7")
    rank = join_attempt(folder, RankInfo(0, 1, 0, "of another job", token="abc"), None)
    assert (rank.attempt, rank.job_id, folder.read_attempts()[0].job_id) == (1, "7", "7")


def test_agents_of_several_nodes_learn_their_names(spool: Spool):
    """As in a job of two nodes, each of which the queue has given a number."""
    spool.train("cluster.nodes=2", "+cluster.processes_per_node=1", fake="succeed")
    (job,) = (spool.home / "queue").glob("*.queued")
    command = job.read_text().partition("exec ")[2]
    assert " 0 >> " in command
    nodes = [
        subprocess.Popen(["sh", "-c", command.replace(" 0 >> ", ' "$NODE" >> ')], env={**os.environ, "NODE": node})
        for node in "01"
    ]
    assert [node.wait(60) for node in nodes] == [0, 0]
    (row,) = spool.folder.read_attempts()
    assert (row.exit, len(row.hosts), row.job_id) == (0, 2, job.stem)
    assert run_status(spool.folder).state == "done"


def test_the_guide_shows_the_methods_of_the_queue_which_is_short():
    text = (PACKAGE / "my_package" / "spool.py").read_text()
    guide = (REPOSITORY / "docs" / "guides" / "own-executor.md").read_text()
    methods = re.findall(r"^    def .*:$", text, re.MULTILINE)
    assert [f"{method} ..." in guide for method in methods] == [True] * 3
    assert text.count("\n") <= 70
