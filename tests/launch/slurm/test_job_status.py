"""Status of a run's SLURM job by the rows of squeue and sacct."""

from pathlib import Path

import pytest

from titan_exp.launch.slurm import executor
from titan_exp.launch.slurm.squeue import Job
from titan_exp.tracking.run_folder.run_folder import RunFolder


@pytest.mark.parametrize(
    ("started", "listed", "ends", "reason"),
    [
        (
            False,
            "COMPLETED",
            {},
            "its job ended before the run was started; slurmd's log on its first node has the reason",
        ),
        (False, None, {"7": "completed"}, "its job ended before the run was started; slurmd's log"),
        (False, "CANCELLED", {}, "cancelled"),
        (False, None, {}, "SLURM has no job of it"),
        (True, "COMPLETED", {}, "completed"),
        (True, None, {"7": "node fail"}, "node fail"),
    ],
)
def test_reason_of_an_ended_job(
    started: bool,
    listed: str | None,
    ends: dict[str, str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    folder = RunFolder(tmp_path)
    folder.add_attempt(
        world_size=1, hosts=(), launched_by="slurm", token="abc", job_id="7", start=1.0 if started else None
    )
    monkeypatch.setattr(executor, "listed_jobs", lambda _: [Job("7", listed, "None", "abc")] if listed else [])
    monkeypatch.setattr(executor, "accounted", lambda _: ends)
    found = executor.SlurmExecutor().status([folder])[tmp_path]
    assert (found.state, found.job_id) == ("gone", "7")
    assert (found.reason or "").startswith(reason)
