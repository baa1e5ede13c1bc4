"""Status of a run's SLURM job by the rows of squeue and sacct."""

from pathlib import Path

import pytest

from titan_exp.launch import remote
from titan_exp.launch.slurm import executor
from titan_exp.launch.slurm.squeue import Job, UnreachableError
from titan_exp.launch.slurm.submit import is_being_submitted
from titan_exp.launch.sweep.shipped_study import cancel_runs
from titan_exp.tracking.run_folder.files import FileLock
from titan_exp.tracking.run_folder.run_folder import RunFolder

UNSTARTED = "its job ended before the run was started; slurmd's log on its first node has the reason"


@pytest.mark.parametrize(
    ("started", "listed", "accounted", "reason"),
    [
        (None, ["COMPLETED"], {}, UNSTARTED),
        (None, [], {"7": "completed"}, UNSTARTED),
        (None, ["CANCELLED"], {}, "cancelled"),
        (None, [], {}, "SLURM has no job of it"),
        (1.0, ["COMPLETED"], {}, "completed"),
        (1.0, [], {"7": "node fail"}, "node fail"),
    ],
)
def test_reason_of_an_ended_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, started, listed, accounted, reason):
    folder = RunFolder(tmp_path)
    folder.add_attempt(world_size=1, hosts=(), launched_by="slurm", token="abc", job_id="7", start=started)
    monkeypatch.setattr(executor, "listed_jobs", lambda _: [Job("7", state, "None", "abc") for state in listed])
    monkeypatch.setattr(executor, "accounted", lambda _: accounted)
    found = executor.SlurmExecutor("slurm").status([folder])[tmp_path]
    assert (found.state, found.job_id, found.reason) == ("gone", "7", reason)


def test_users_of_one_folder_submit_without_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote, "SUBMITTER_LIMIT", 0.0)
    slurm = executor.SlurmExecutor("slurm")
    with slurm.submitting(tmp_path):
        monkeypatch.setattr("os.geteuid", lambda: 4242)
        with slurm.submitting(tmp_path) as other, FileLock(other.path.with_name("sbatch.lock")) as sbatch:
            sbatch.acquire("sbatch")
            monkeypatch.undo()
            token = other.path.parent / "abc"
            token.symlink_to(".")
            assert is_being_submitted(tmp_path, "abc_3"), "by whomever"


def test_cancel_of_jobs_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def denied(*_: str) -> str:
        raise UnreachableError("Access/permission denied")

    jobs = {"7": "RUNNING", "8": "PENDING"}
    folders = {job: RunFolder(tmp_path / f"run{job}") for job in jobs}
    for job, folder in folders.items():
        folder.path.mkdir()
        folder.add_attempt(world_size=1, hosts=(), launched_by="slurm", token=f"abc{job}", job_id=job)
    monkeypatch.setattr(executor, "ask", denied)
    monkeypatch.setattr(executor, "listed_jobs", lambda _: [Job(job, jobs[job], "None", f"abc{job}") for job in jobs])
    assert not cancel_runs([*folders.values()], {}, print)
    running, queued = capsys.readouterr().out.splitlines()
    assert "job 7: asked to save and stop; cluster.stop_limit is not enforced: Access" in running
    assert "not cancelled: Access" in queued
    assert [folder.stop_requested() for folder in folders.values()] == [True, False]
