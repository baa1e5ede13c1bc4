"""Executor over ssh of the guide, with a stand-in for ssh: two hosts of this machine, each with a rank."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.fleet import PACKAGE, Fleet
from tests.launch.launching import REPOSITORY, wait_until
from titan_exp.cli.main import main
from titan_exp.launch.rank import host_agent
from titan_exp.launch.rank.host_agent import HostAgent, HostFile
from titan_exp.launch.run_status import run_status
from titan_exp.tracking.run_folder.run_folder import RunFolder

SSH = """\
#!/bin/sh
# ssh -o BatchMode=yes -p PORT HOST COMMAND
echo "$4 $5" >> ssh.calls
if [ "$5" = down ]; then echo "ssh: connect to host down: No route to host" >&2; exit 255; fi
exec sh -c "$6"
"""


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    fleet = Fleet(tmp_path, monkeypatch, "cluster=ssh", "cluster.processes_per_node=1")
    yield fleet
    for process in fleet.processes():
        process.kill()


def test_a_run_trains_on_two_hosts(fleet: Fleet, capsys: pytest.CaptureFixture[str]):
    words = ["training.steps=2", "training.seq_len=64", "evaluation.every=0", "training.global_batch_size=4"]
    folder = fleet.train(*words)
    fleet.wait("done", limit=120)
    assert (fleet.home / "ssh.calls").read_text() == "22 node1\n22 node2\n"
    (row,) = folder.read_attempts()
    assert (row.exit, row.hosts, row.world_size, row.job_id) == (0, ("node1", "node2"), 2, row.token)
    assert "port: 22" in folder.config.read_text()
    capsys.readouterr()
    # Options are not part of the run's id, so the same run is found.
    fleet.train(*words, "cluster.options.port=23")
    assert "done" in capsys.readouterr().out
    assert main(["logs", str(folder.path)]) == 0
    assert "rank-00000.log" in capsys.readouterr().out


def test_the_peer_of_a_killed_rank_is_ended_and_retry_goes_on(fleet: Fleet):
    folder = fleet.train(fake="killed_on_rank_1")
    fleet.wait("failed")
    assert "a signal killed rank 1" in (run_status(folder).reason or "")
    fleet.set("TITAN_EXP_RANK_MAIN", "tests.launch.fake_ranks.succeed")
    assert main(["retry", str(folder.path)]) == 0
    fleet.wait("done")
    assert [row.exit for row in folder.read_attempts()] == [1, 0]


def test_the_peer_of_a_failed_rank_is_ended_with_its_cause(fleet: Fleet, capsys: pytest.CaptureFixture[str]):
    folder = fleet.train(fake="raise_on_rank_1")
    fleet.wait("failed")
    assert run_status(folder).reason == "rank 1: ValueError: the loss went for a walk"
    capsys.readouterr()
    assert main(["logs", str(folder.path)]) == 0
    assert "the loss went for a walk" in capsys.readouterr().out


def test_cancel_saves_and_the_same_command_continues(fleet: Fleet, capsys: pytest.CaptureFixture[str]):
    folder = fleet.train(fake="obey_stop")
    wait_until(lambda: all((folder.path / f"seen-{rank}.json").exists() for rank in (0, 1)))
    assert run_status(folder).state == "running"
    assert main(["cancel", str(folder.path)]) == 0
    assert "asked to save and stop" in capsys.readouterr().out
    fleet.wait("preempted")
    fleet.train(fake="obey_stop")
    fleet.wait("done")


def test_a_rank_that_does_not_save_in_time_is_killed(fleet: Fleet):
    folder = fleet.train("+cluster.stop_limit=1", fake="wait_for_ever")
    wait_until((folder.path / "seen-1.json").exists)
    assert main(["cancel", str(folder.path)]) == 0
    fleet.wait("preempted")
    assert run_status(folder).reason == "titan-exp cancel, and killed before all ranks had saved"


def test_ranks_of_a_killed_agent_save_and_stop(fleet: Fleet):
    folder = fleet.train(fake="obey_stop")
    wait_until(lambda: all((folder.path / f"seen-{rank}.json").exists() for rank in (0, 1)))
    os.kill(fleet.processes("host_agent")[0].pid, signal.SIGKILL)
    fleet.wait("preempted")


def test_a_host_that_cannot_be_reached_ends_the_others(fleet: Fleet, capsys: pytest.CaptureFixture[str]):
    folder = fleet.train("cluster.options.hosts=[node1,down]", fake="obey_stop", code=1)
    assert "cannot start down: ssh: connect to host down: No route to host" in capsys.readouterr().out
    fleet.wait("failed")
    assert folder.read_attempts()[-1].exit == 1


def test_a_host_that_has_a_run_refuses_another(fleet: Fleet, capsys: pytest.CaptureFixture[str]):
    folder = fleet.train("optimizer.lr=1e-3", fake="obey_stop")
    for words in (["-m", "optimizer.lr=1e-3,2e-3"], ["optimizer.lr=2e-3"]):  # found running; in another command
        capsys.readouterr()
        with contextlib.suppress(SystemExit):
            assert main([*fleet.words, *words]) == 2
        assert f"node1 runs x/{folder.path.name}. Type the same command" in "".join(capsys.readouterr())
    assert main(["cancel", str(folder.path)]) == 0
    wait_until(lambda: not fleet.processes())
    (other,) = (RunFolder(path) for path in (fleet.home / "runs" / "x").glob("[!.]*/") if path != folder.path)
    assert run_status(other).state == "new"  # the refused one is listed
    fleet.set("TITAN_EXP_RANK_MAIN", "tests.launch.fake_ranks.succeed")
    assert main([*fleet.words, "optimizer.lr=2e-3"]) == 0
    wait_until(lambda: not fleet.processes())
    assert [run_status(run).state for run in (folder, other)] == ["preempted", "done"]


def test_a_silent_host_is_lost(fleet: Fleet, monkeypatch: pytest.MonkeyPatch):
    folder = fleet.train(fake="succeed")
    fleet.wait("done")
    agent = HostAgent(folder, folder.read_attempts()[-1], 0)
    assert agent._overdue() is None
    other = HostFile(folder, 1, 1)
    other.path.write_text("")
    os.utime(other.path, (time.time() - 100, time.time() - 100))
    result = agent._overdue()
    assert result is not None
    assert result.reason == "host node2 has given no sign of life for 60 s"
    other.path.unlink()
    monkeypatch.setattr(host_agent, "START_LIMIT", -1.0)
    result = agent._overdue()
    assert result is not None
    assert (result.reason or "").startswith("host node2 did not start within")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["+cluster.options.prot=2"], "cluster.options.prot=2: there is no such option\n    did you mean port?"),
        (["cluster.options.port=abc"], "cluster.options.port=abc: must be a whole number"),
        (["~cluster.options.hosts"], "+cluster.options.hosts=VALUE"),
        (
            ["cluster.options.hosts=[node1]"],
            "This run needs 2 nodes with 1 process each, and cluster.options names 1 host. Name",
        ),
        (["cluster.kind=local", "cluster.gpus_per_node=null", "cluster.nodes=1"], "no such option\n    leave it out"),
        (["cluster.kind=my_package.launch.dataclass"], "does not extend Executor"),
        (["cluster.kind=titan_exp.launch.remote.HostsExecutor"], "the class defines no hosts and no start"),
    ],
)
def test_wrong_options_are_refused(fleet: Fleet, words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main([*fleet.words, *words]) == 2
    assert message in capsys.readouterr().err
    assert not fleet.processes()
    assert not (fleet.home / "runs").exists()


def test_the_guide_shows_the_example_and_it_is_short():
    text = (PACKAGE / "my_package" / "launch.py").read_text()
    guide = (REPOSITORY / "docs" / "guides" / "own-executor.md").read_text()
    assert text.partition("class SshExecutor")[2].strip() in guide
    assert text.count("\n") < 40
    added = REPOSITORY / "tests/adding/executor/titan_exp/launch/ssh/executor.py"
    assert re.sub(r"\s+", "", added.read_text()) == re.sub(r"\s+", "", text)
