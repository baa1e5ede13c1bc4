"""Status of a run's SLURM job by the rows of squeue and sacct."""

from pathlib import Path

import pytest

from titan_exp.launch import remote
from titan_exp.launch.slurm import executor, squeue
from titan_exp.launch.slurm.squeue import Job, UnreachableError
from titan_exp.launch.slurm.submit import is_being_submitted
from titan_exp.launch.sweep.shipped_study import cancel_runs
from titan_exp.tracking.run_folder.files import FileLock
from titan_exp.tracking.run_folder.run_folder import RunFolder

UNSTARTED = "its job ended before the run started (the log of slurmd on its first node says why)"


@pytest.mark.parametrize(
    ("started", "listed", "accounted", "reason"),
    [
        (None, ["COMPLETED"], {}, UNSTARTED),
        (None, [], {"7": "completed"}, UNSTARTED),
        (None, ["CANCELLED"], {}, "cancelled"),
        (None, [], {}, "SLURM has no job of this run"),
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


TABLES = {
    "sinfo": "h100|1-00:00:00|4|gpu:h100:8\ndebug|30:00|1|(null)\n",
    "sacctmgr": "lab||normal,high\nclass|debug|\n",
}
FAILED = "sbatch: error: Batch job submission failed: "


@pytest.mark.parametrize(
    ("cause", "words", "alternative"),
    [
        ("Invalid partition name specified", "another partition", "cluster.partition=debug  time limit 30:00"),
        (
            "Requested time limit is invalid (missing or exceeds some limit)",
            "cluster.time_limit",
            "time limit 1-00",
        ),
        ("Node count specification invalid", "fewer nodes", "nodes 4, GRES gpu:h100:8"),
        ("Requested node configuration is not available", "fewer nodes or GPUs", "GRES gpu:h100:8"),
        ("Invalid generic resource (gres) specification", "cluster.gpu_type=null", "GRES gpu:h100:8"),
        ("Invalid account or account/partition combination specified", "an account", "account=lab cluster.qos=high"),
        ("Invalid qos specification", "a QOS", "cluster.account=class cluster.partition=debug"),
        ("Unspecified error", "", ""),
    ],
)
def test_a_refused_sbatch_says_what_to_type(monkeypatch: pytest.MonkeyPatch, cause: str, words: str, alternative: str):
    monkeypatch.setattr(squeue, "ask", lambda program, *_: TABLES[program])
    asked, *said = squeue.explain_refusal(f"sbatch: error: first\n{FAILED}{cause}\n", ["--nodes=9"]).splitlines()
    assert (asked, said[:2]) == ("asked: --nodes=9", ["sbatch: error: first", FAILED + cause])
    assert len(said) == (2 if not words else 6 if "account" in words or "QOS" in words else 5)
    assert all(text in "\n".join(said[2:]) for text in (words, alternative))

    def silent(*_: str) -> str:
        raise UnreachableError("no answer")

    monkeypatch.setattr(squeue, "ask", silent)
    assert ("(no answer)" in squeue.explain_refusal(FAILED + cause, [])) == bool(words)


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
    cancelled = cancel_runs([*folders.values()], {}, print)
    assert any(line.startswith("not cancelled") for line in cancelled.values())
    running, queued = capsys.readouterr().out.splitlines()
    assert "job 7: asked to save and stop, but SLURM will not enforce cluster.stop_limit: Access" in running
    assert "not cancelled: Access" in queued
    assert [folder.stop_requested() for folder in folders.values()] == [True, False]
