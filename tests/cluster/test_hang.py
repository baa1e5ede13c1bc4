"""A hung rank on a real SLURM: diagnosed, and the run requeued."""

import pytest

from tests.cluster.submitting import Submitting, ends
from titan_exp.launch.watchdog import HangFiles
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics


@pytest.mark.night
def test_hung_rank_is_named_and_the_run_is_requeued(cluster: Submitting, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TITAN_EXP_RANK_MAIN", "tests.launch.hanging_ranks.once_in_the_loader")
    monkeypatch.setenv("HANGING_RANK", "1")
    folder, _ = cluster.submitted(
        "parallelism.dp_shard=2",
        "cluster.processes_per_node=1",
        "training.steps=4",
        "evaluation.every=0",
        "checkpoint.every=1",
        "cluster.hang_kill_minutes=0.05",
    )
    files = HangFiles(folder.attempt_logs(1), 2)
    cluster.wait_until(lambda: len(ends(folder)) == 2, lambda: cluster.story(folder))
    assert ends(folder)[0] == 86
    reason = folder.read_attempts()[0].reason or ""
    assert reason.startswith("hung at step 3 in the training step: rank 1 is at ")
    assert reason.endswith("in _await_a_batch while the others wait in a collective")
    assert "_await_a_batch" in files.stacks(1).read_text()
    assert "sync_step_flags" in files.stacks(0).read_text()
    assert cluster.ended(folder, "done") is None
    assert ends(folder) == [86, 0]
    assert [row["step"] for row in read_metrics(folder.metrics)][-1] == 4
