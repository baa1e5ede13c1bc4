"""groups.jsonl: the history that a replay reads, the time lost, and the lines of the console."""

import json
from pathlib import Path

import pytest

from titan_exp.cli import status
from titan_exp.compare.compared_metrics import METRIC_BY_NAME
from titan_exp.compare.runs import read_run
from titan_exp.config.errors.user_error import UserError
from titan_exp.extensions.replica_groups.events import GroupEventLines, GroupHistory, record_event, summarize_groups
from titan_exp.tracking.run_folder.run_folder import RunFolder


def quorum(folder: RunFolder, attempt: int, step: int, groups: list[int], joined: list[int] | None = None) -> None:
    record_event(folder, attempt, event="quorum", step=step, quorum=1, groups=groups, joined=joined or [])


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def test_the_history_is_that_of_the_kept_steps(folder):
    quorum(folder, 1, 0, [0, 1, 2])
    quorum(folder, 1, 5, [0, 2])  # step 6 is refused among two, and repeated by one
    quorum(folder, 1, 5, [2])
    quorum(folder, 1, 8, [2, 1])
    quorum(folder, 2, 6, [0, 1, 2])  # the fleet died, and continues from its checkpoint
    history = GroupHistory(folder.path)
    assert [history.groups_of(step) for step in range(1, 10)] == [3, 3, 3, 3, 3, 1, 3, 3, 3]
    assert history.largest == 3
    quorum(folder, 3, 2, [0, 1])  # and once more, from an earlier one
    assert [GroupHistory(folder.path).groups_of(step) for step in range(1, 10)] == [3, 3, *[2] * 7]


def test_a_step_before_the_history_is_refused(folder):
    quorum(folder, 1, 4, [0, 1])
    assert GroupHistory(folder.path).groups_of(5) == 2
    with pytest.raises(UserError, match="begin after step 4"):
        GroupHistory(folder.path).groups_of(4)


def test_time_lost_counts_stalls_restarts_and_repeated_steps(folder):
    for number, start in enumerate((100.0, 200.0), 1):
        folder.add_attempt(world_size=2, hosts=["localhost"])
        folder.update_attempt(number, start=start, end=start + 50)
    events = [
        {"time": 105.0, "attempt": 1, "event": "quorum", "step": 0, "quorum": 1, "groups": [0, 1], "joined": []},
        {"time": 207.0, "attempt": 2, "event": "quorum", "step": 2, "quorum": 1, "groups": [0, 1], "joined": []},
    ]
    (folder.path / "groups.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    rows = [(1, 1, 0.5), (2, 1, 0.0), (3, 1, 0.0), (4, 1, 0.0), (3, 2, 1.5), (4, 2, 0.0)]
    written = [
        {"step": step, "tokens": 10 * step, "attempt": attempt, "stall": stall, "step_time_median": 2.0}
        for step, attempt, stall in rows
    ]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in written))
    summary = summarize_groups(folder)
    assert summary is not None
    assert summary.stall == pytest.approx(2.0)
    assert summary.restarts == pytest.approx(7 + 2 * 2.0), "the second start, and steps 3 and 4 again"
    folder.config.write_text("experiment: {name: made}\n")
    metric = METRIC_BY_NAME["time_lost"]
    assert metric.read(read_run(folder.path), 40) == pytest.approx(13 / 3600)
    (folder.path / "groups.jsonl").unlink()
    assert metric.read(read_run(folder.path), 40) is None


def test_status_has_columns_of_groups(folder, capsys):
    folder.config.write_text("experiment: {name: made}\n")
    titles = ["state", "GPU-hours", "groups", "quorum", "heals", "time", "lost", "continued", "from"]

    def shown() -> list[str]:
        assert status.run([str(folder.path)]) == 0
        head = capsys.readouterr().out.splitlines()[0].split()
        return [title for title in head if title in titles]

    assert shown() == ["state"]
    record_event(folder, 1, event="started", group=0, start=0)
    record_event(folder, 1, event="started", group=1, start=1)
    quorum(folder, 1, 3, [0], [0])
    assert shown() == ["state", "groups", "quorum", "heals", "time", "lost"]
    assert status.run([str(folder.path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["groups"] == {"living": 1, "groups": 2, "quorum": 1, "heals": 1, "stall": 0.0, "restarts": 0.0}
    assert all(f'"{title}"' in status.HELP_TEXT for title in ("groups", "heals", "time lost"))


def test_deaths_heals_and_groups_given_up_are_lines(folder):
    record_event(folder, 1, event="started", group=0, start=0, job_id="1")  # an earlier attempt
    lines = GroupEventLines(folder, 2)
    for group in (0, 1):
        record_event(folder, 2, event="started", group=group, start=group, job_id="1")
    quorum(folder, 2, 0, [0, 1])
    assert list(lines.lines()) == []
    record_event(folder, 2, event="ended", group=1, exit=1, reason="killed rank 0")
    record_event(folder, 2, event="started", group=1, start=2, job_id="1")
    quorum(folder, 2, 6, [0])
    quorum(folder, 2, 9, [0, 1], [1])
    record_event(folder, 2, event="lighthouse started")
    record_event(folder, 2, event="given up", group=1)
    record_event(folder, 2, event="ended", group=0, exit=0, reason=None)
    assert list(lines.lines()) == [
        "replica group 1 ended: killed rank 0",
        "replica group 1 starts again, log 2",
        "replica group 1 is gone: 1 of 2 in step 7",
        "replica group 1 has healed: 2 of 2 in step 10",
        "the lighthouse of the replica groups died and starts again",
        "replica group 1 stays away for good, and the others train on",
    ]
