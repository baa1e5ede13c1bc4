"""A user's executor by import path, from `titan-exp train` to its ranks' rendezvous."""

from pathlib import Path

import pytest

from tests.launch.launching import REPOSITORY, wait_until
from tests.launch.own_executor import STARTED
from titan_exp.cli.main import main
from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.executor import executor_for
from titan_exp.launch.run_status import run_status
from titan_exp.tracking.run_folder.run_folder import RunFolder

KIND = "tests.launch.own_executor.DetachedExecutor"


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*overrides: str) -> RunFolder:
        small = ["model=llama_debug", "cluster.device=cpu", "parallelism.dp_shard=2", "experiment.name=x"]
        assert main(["train", *small, f"cluster.kind={KIND}", *overrides]) == 0
        (path,) = (tmp_path / "runs" / "x").glob("[!.]*")
        return RunFolder(path)

    yield run
    while STARTED:
        process = STARTED.pop()
        try:
            process.wait(30)
        finally:
            process.kill()


@pytest.mark.night
@pytest.mark.timeout(240)
def test_its_ranks_meet_and_train(train, capsys: pytest.CaptureFixture[str]):
    short = ["training.steps=2", "training.seq_len=64", "evaluation.every=0", "training.global_batch_size=4"]
    folder = train(*short)
    assert "submitted job" in capsys.readouterr().out
    # The attempt is closed after the state is written.
    wait_until(lambda: not run_status(folder).active and folder.read_attempts()[-1].exit is not None, 200)
    status = run_status(folder)
    assert (status.state, status.step, status.reason) == ("done", 2, None)
    (row,) = folder.read_attempts()
    assert (row.launched_by, row.exit, row.world_size, row.job_id) == (KIND, 0, 2, row.token)
    assert [path.name for path in sorted(folder.attempt_logs(1).glob("rank-*.json"))] == [
        "rank-00000.json",
        "rank-00001.json",
    ]


@pytest.mark.night
def test_status_and_cancel(train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("TITAN_EXP_RANK_MAIN", "tests.launch.fake_ranks.obey_stop")
    folder = train()
    job_id = folder.read_attempts()[-1].token
    assert run_status(folder).job_id == job_id
    assert main(["train", "-m", "model=llama_debug", "cluster.device=cpu", f"cluster.kind={KIND}", "--dry-run"]) == 0
    wait_until(lambda: folder.holder() is not None and (folder.path / "seen-0.json").exists())
    assert run_status(folder).state == "running"
    assert main(["cancel", str(folder.path)]) == 0
    assert "asked to save and stop" in capsys.readouterr().out
    wait_until(lambda: not run_status(folder).active)
    status = run_status(folder)
    assert (status.state, status.reason) == ("preempted", "titan-exp cancel")


def test_unknown_kinds_are_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "model=llama_debug", "cluster.kind=slrum"]) == 2
    assert "slurm" in capsys.readouterr().err
    assert main(["train", "model=llama_debug", "cluster.kind=tests.launch.own_executor.Missing"]) == 2
    assert "tests.launch.own_executor has no Missing" in capsys.readouterr().err
    with pytest.raises(UserError, match="Built in are local, slurm"):
        executor_for("flux")
