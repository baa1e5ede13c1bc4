"""sacct's end of jobs that were killed without a record and that slurmctld has forgotten."""

import getpass
import json
from collections.abc import Callable

import pytest

from tests.cluster.submitting import Submitting, ends
from titan_exp.cli.main import main
from titan_exp.launch.slurm.squeue import ended_as

StandIn = Callable[[str], None]


@pytest.mark.night
def test_sacct_gives_the_end_of_forgotten_jobs(
    accounted: Submitting, stand_in: StandIn, capsys: pytest.CaptureFixture[str]
):
    """Nobody lived to close the attempt: not of an array's tasks, nor of a job over two nodes."""
    stand_in("hang")
    plans = [accounted.plan(f"experiment.seed={seed}") for seed in (0, 1)]
    assert [submission.outcome for submission in accounted.submit(*plans)] == ["submitted"] * 2
    alone = accounted.plan("experiment.seed=2", "cluster.processes_per_node=1", "parallelism.dp_shard=2")
    accounted.submit(alone)
    folders = [plan.folder for plan in (*plans, alone)]
    jobs = [folder.read_attempts()[-1].job_id or "" for folder in folders]
    for folder in folders:
        accounted.running(folder, "hanging")
    accounted.slurm.run("scancel", *jobs)
    accounted.wait_until(lambda: not accounted.slurm.queue(), accounted.slurm.state)
    assert [ends(folder) for folder in folders] == [[None]] * 3
    assert {status.reason for status in accounted.backend.status(folders).values()} == {"cancelled"}
    accounted.slurm.forget_ended_jobs()
    assert accounted.slurm.run("squeue", "--noheader", "--states=all") == ""
    by_whom = f"cancelled by {getpass.getuser()}"

    def told() -> bool:
        return [status.reason for status in accounted.backend.status(folders).values()] == [by_whom] * 3

    accounted.wait_until(told, lambda: str(accounted.backend.status(folders)))
    assert main(["status", f"paths.runs={accounted.runs}", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["state"], row["reason"]) for row in rows] == [("lost", by_whom)] * 3
    # What was lost is started again, though SLURM knows none of it.
    stand_in("succeed")
    assert [submission.outcome for submission in accounted.submit(*plans)] == ["submitted"] * 2
    accounted.ended(folders[0], "done")


@pytest.mark.parametrize(
    ("state", "code", "words"),
    [
        ("TIMEOUT", "0:0", "timeout"),
        ("NODE_FAIL", "1:0", "node fail (exit code 1)"),
        ("OUT_OF_MEMORY", "0:125", "out of memory (signal 125)"),
        ("CANCELLED by 0", "0:15", "cancelled by root (signal 15)"),
        ("CANCELLED by 4000000000", "0:0", "cancelled by 4000000000"),
    ],
)
def test_text_of_sacct_states(state: str, code: str, words: str):
    assert ended_as(state, code) == words
