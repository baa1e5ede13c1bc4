"""Changes of code and data since the last start, and since a finished run."""

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_git import git
from tests.launch.test_rank_main import finish as finish_rank
from tests.launch.test_rank_main import start
from tests.launch.test_run_plan import planned
from titan_exp.cli.main import main
from titan_exp.compare.runs import read_run
from titan_exp.config.errors.user_error import UserError
from titan_exp.data.sources import base
from titan_exp.data.sources.base import known_identity
from titan_exp.launch.provenance import (
    attempt_changes,
    code_changes,
    edited_code,
    report_changes,
    report_large_patch,
    report_stale,
)
from titan_exp.launch.run_plan import RunPlan, create_run_folder, refresh_snapshot
from titan_exp.tracking.run_folder.run import Run, code_record
from titan_exp.tracking.run_folder.run_folder import RunState, StateName


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Repository with a decay, and a corpus beside it; the current folder."""
    folder = tmp_path / "lab"
    (folder / "lab_of_mine").mkdir(parents=True)
    (folder / "lab_of_mine/decay.py").write_text("def slow(progress): return 1 - progress\n")
    (folder / "notes.md").write_text("")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").write_text("some text\n" * 100)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def plan_of(lab: Path, *overrides: str) -> RunPlan:
    words = ("lr_schedule.decay=lab_of_mine.decay.slow", "experiment.name=idea")
    data = ("data=text", f"data.paths=[{lab.parent / 'corpus'}]", "data.document=paragraph")
    return planned(lab.parent / "runs", *words, *data, *overrides)


def finish(plan: RunPlan) -> RunPlan:
    """Folder of a finished run, as launcher and rank 0 leave it."""
    create_run_folder(plan)
    row = plan.folder.add_attempt(world_size=1, hosts=["here"])
    plan.folder.update_attempt(row.attempt, start=time.time(), data=known_identity(plan.experiment.data)[0])
    plan.folder.write_state(RunState("done", 3, time.time(), 1, None))
    return plan


def printed(*plans: RunPlan) -> list[str]:
    lines: list[str] = []
    report_stale(plans, lines.append)
    return lines


def test_an_unchanged_run_says_nothing(lab: Path) -> None:
    assert printed(finish(plan_of(lab))) == []
    (lab / "notes.md").write_text("of another day")
    git(lab, "commit", "-qam", "notes")
    os.utime(lab.parent / "corpus/a.txt")
    assert printed(plan_of(lab)) == []  # code and data are the same


def test_a_finished_run_of_other_code_and_data(lab: Path) -> None:
    plan, commit = finish(plan_of(lab)), git(lab, "rev-parse", "HEAD")[:10]
    (lab / "lab_of_mine/decay.py").write_text("def slow(progress): return 1\n")
    (lab / "lab_of_mine/new.py").write_text("")
    (lab.parent / "corpus/a.txt").write_text("other txt\n" * 100)
    head, code, data, remedy = printed(plan_of(lab))
    assert head == f"The result in {plan.folder.path} comes from other code or data than you have now:"
    assert code == (
        f"  lab: from commit {commit} to commit {commit} with uncommitted changes; "
        "2 files differ: lab_of_mine/decay.py and lab_of_mine/new.py"
    )
    assert data.startswith("  data files: from 1 file, 1000 bytes, content ")
    assert "experiment.name=idea-2" in remedy
    # The remedy leads to another folder, of the same run id.
    assert plan_of(lab, "experiment.name=idea-2").folder.path != plan.folder.path


def begin(plan: RunPlan, state: StateName = "preempted") -> RunPlan:
    """Folder of a run that has saved a checkpoint and ended in this state."""
    finish(plan)
    plan.folder.write_state(RunState(state, 3, time.time(), 1, None))
    checkpoint = plan.folder.path / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / ".metadata").write_bytes(b"x")
    return plan


def test_data_that_a_rank_would_refuse_are_refused_before_the_launch(lab: Path) -> None:
    corpus = lab.parent / "corpus/a.txt"
    plan = begin(plan_of(lab))
    child = [f"checkpoint.continue_from={plan.folder.path}", "training.steps=500"]
    os.utime(corpus)
    (lab.parent / "corpus/empty.txt").touch()
    assert plan_of(lab).run_id == plan.run_id
    assert plan_of(lab, *child).run_id != plan.run_id
    corpus.write_text("other txt\n" * 100)
    with pytest.raises(
        UserError, match=r"cannot continue on other data[\s\S]*this checkpoint read 1 file, 1000 bytes"
    ) as own:
        plan_of(lab)
    with pytest.raises(UserError, match=r"cannot continue on other data") as parents:
        plan_of(lab, *child)
    # The remedies lead to new runs.
    (violation,) = own.value.violations
    words = violation.remedy.removeprefix("use the former files, or start a new run with ").partition(",")[0].split()
    assert words == [f"checkpoint.continue_from=idea/{plan.run_id}", "checkpoint.continue_data=restart"]
    assert plan_of(lab, *words).run_id != plan.run_id
    assert parents.value.violations[0].remedy == "use the former files, or checkpoint.continue_data=restart"
    assert plan_of(lab, *child, "checkpoint.continue_data=restart").run_id != plan.run_id
    plan.folder.write_state(RunState("done", 3, time.time(), 1, None))
    assert "other code or data" in printed(plan_of(lab))[0], "a finished run is not continued"
    plan.folder.write_state(RunState("failed", 0, time.time(), 1, None))
    (plan.folder.path / "checkpoints/step-00000002/.metadata").unlink()
    assert plan_of(lab).run_id == plan.run_id, "a run without a checkpoint begins anew"


def test_of_data_without_a_record_a_rank_decides(lab: Path) -> None:
    plan = begin(plan_of(lab))
    plan.folder.attempts.write_text("")
    (lab.parent / "corpus/a.txt").write_text("other txt\n" * 100)
    assert plan_of(lab).run_id == plan.run_id


def test_code_of_titan_exp_counts(lab: Path) -> None:
    plan = finish(plan_of(lab))
    record = json.loads(plan.folder.code.read_text())
    name = next(iter(record["files"]))
    record |= {"commit": "0" * 40, "dirty": False, "files": {**record["files"], name: "0" * 12}}
    plan.folder.code.write_text(json.dumps(record))
    _, line, _ = printed(plan)
    assert line.startswith("  titan_exp: from commit 0000000000 to commit ")
    assert line.endswith(f"; 1 file differs: {name}")


def test_a_sweep_counts_results_by_change(lab: Path) -> None:
    plans = [finish(plan_of(lab, f"experiment.seed={seed}")) for seed in range(3)]
    plans.append(plan_of(lab, "experiment.seed=3"))
    create_run_folder(plans[-1])
    (lab / "lab_of_mine/decay.py").write_text("def slow(progress): return 1\n")
    head, code, remedy = printed(*plans)
    ids = [plan.run_id for plan in plans]
    assert head == f"3 of 3 results ({ids[0]}, {ids[1]} and {ids[2]}) come from other code or data than you have now:"
    assert code.count("lab_of_mine/decay.py") == 1
    assert f"remove those folders of {plans[0].folder.path.parent}" in remedy


@pytest.mark.parametrize("swept", [(), ("-m", "experiment.seed=0,1")])
def test_the_command_line_says_so(lab: Path, capfd: pytest.CaptureFixture[str], swept: Sequence[str]) -> None:
    plans = [finish(plan_of(lab, f"experiment.seed={seed}", "checkpoint=none")) for seed in ((0, 1) if swept else (0,))]
    typed = [word for word in plans[0].overrides if not word.startswith("experiment.seed")]
    for edited in (False, True):
        assert main(["train", *typed, *swept]) == 0
        assert ("from other code or data than you have now" in capfd.readouterr().out) == edited
        (lab / "lab_of_mine/decay.py").write_text("def slow(progress): return 1\n")


def test_large_corpora_touched_since(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "WHOLE_BYTES", 10)
    plan = finish(plan_of(lab))
    assert printed(plan) == []
    os.utime(lab.parent / "corpus/a.txt", (time.time() + 60, time.time() + 60))
    _, line, _ = printed(plan)
    assert "modified since" in line
    assert "others may differ" in line


def test_data_that_is_gone(lab: Path) -> None:
    plan = finish(plan_of(lab))
    shutil.rmtree(lab.parent / "corpus")
    _, line, _ = printed(plan)
    assert line.startswith("  data: we could not compare it, since nothing can read it now (")


def test_the_next_attempt_says_what_changed(lab: Path) -> None:
    plan = plan_of(lab)
    create_run_folder(plan)
    plan.folder.add_attempt(world_size=1, hosts=["here"])
    refresh_snapshot(plan, 1)
    assert attempt_changes(Run(plan.folder), 2) == ("attempt 1", [])
    (lab / "lab_of_mine/decay.py").write_text("def slow(progress): return 1\n")
    refresh_snapshot(plan, 1)
    since, (line,) = attempt_changes(Run(plan.folder), 2)
    assert (since, "1 file differs: lab_of_mine/decay.py" in line) == ("attempt 1", True)
    lines: list[str] = []
    report_changes([plan], lines.append)
    assert lines == [f"Code changed since attempt 1:\n  {line}"]
    # Both versions are kept.
    first, second = (code_record(json.loads((folder / "code.json").read_text())) for folder in codes(plan))
    assert code_changes(first, second) == [line]
    assert "return 1\n" in plan.folder.diff.read_text()


def test_ranks_print_what_changed(lab: Path) -> None:
    """Started by hand: after an attempt with other code, and after an edit since the launch."""
    plan = plan_of(lab)
    create_run_folder(plan)
    row = plan.folder.add_attempt(world_size=1, hosts=["here"])
    plan.folder.update_attempt(row.attempt, end=time.time(), exit=1)
    (lab / "lab_of_mine/decay.py").write_text("def slow(progress): return 1\n")
    refresh_snapshot(plan, 1)
    (lab / "lab_of_mine/decay.py").write_text("def slow(progress): return 2\n")
    code, out, _ = finish_rank(start(plan.folder, "succeed"))
    assert code == 0
    changed, edited = (
        out.index("Code changed since attempt 1:\n  lab: "),
        out.index("You have edited code after the launch"),
    )
    assert changed < edited < out.index("hello from rank 0")
    assert out.count("1 file differs: lab_of_mine/decay.py") == 2


def test_snapshots_are_not_compared_with_edited_code(lab: Path) -> None:
    plan = plan_of(lab)
    create_run_folder(plan)
    assert edited_code(plan.folder) == []
    (lab / "lab_of_mine/decay.py").write_text("def slow(progress): return 1\n")
    record = json.loads(plan.folder.code.read_text())
    assert edited_code(plan.folder) == ["lab: 1 file differs: lab_of_mine/decay.py"]
    plan.folder.code.write_text(json.dumps(record | {"frozen": {"package": "p", "own": "o", "loose": []}}))
    assert edited_code(plan.folder) == []
    plan.folder.code.write_text(json.dumps(record | {"frozen": {"package": "p", "own": None, "loose": []}}))
    assert len(edited_code(plan.folder)) == 1


def codes(plan: RunPlan) -> tuple[Path, Path]:
    return plan.folder.attempt_logs(1), plan.folder.path


def test_a_continued_run_is_compared_with_its_parent(lab: Path) -> None:
    parent = finish(plan_of(lab))
    step = parent.folder.checkpoints / "step-00000003"
    step.mkdir(parents=True)
    (step / ".metadata").touch()
    (lab / "lab_of_mine/decay.py").write_text("def slow(progress): return 1\n")
    child = plan_of(lab, f"checkpoint.continue_from={parent.folder.path}", "training.steps=2000")
    create_run_folder(child)
    since, (line,) = attempt_changes(Run(child.folder), 1)
    assert since == f"idea/{parent.run_id}"
    assert "lab_of_mine/decay.py" in line


def test_comparison_counts_changes_of_user_code(lab: Path) -> None:
    (lab / "lab_of_mine/decay.py").write_text("def slow(progress): return 1\n")
    plan = finish(plan_of(lab))
    record = json.loads(plan.folder.code.read_text())
    plan.folder.code.write_text(json.dumps(record | {"dirty": False}))
    assert read_run(plan.folder.path).dirty
    plan.folder.code.write_text(json.dumps(record | {"dirty": False, "imported": []}))
    assert read_run(plan.folder.path).dirty is False


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"commit": "a" * 40, "dirty": True}, {"commit": "a" * 40, "dirty": True}, []),
        ({"version": "1"}, {"version": "2"}, ["titan_exp: from version 1 to version 2"]),
        ({"diff": "1", "commit": "a"}, {"diff": "2", "commit": "a"}, ["titan_exp: commit a"]),
        (
            {"imported": [{"name": "lab", "version": "1"}]},
            {"imported": [{"name": "more", "version": "2"}]},
            [
                "lab: this run does not import it any more",
                "more: this run imports it now, and did not before (version 2)",
            ],
        ),
        (
            {"files": {str(number): "0" for number in range(7)}},
            {"files": {str(number): "1" for number in range(7)}},
            ["titan_exp: no commit; 7 files differ: 0, 1, 2, 3, 4 and 2 more"],
        ),
    ],
)
def test_records_without_files_and_with_many(
    before: Mapping[str, Any], after: Mapping[str, Any], expected: list[str]
) -> None:
    assert code_changes(code_record(before), code_record(after)) == expected


def test_a_large_diff_is_named_with_its_files(lab: Path) -> None:
    said: list[str] = []
    (lab / "lab_of_mine" / "new.py").write_text("A = 1\n")
    small = plan_of(lab)
    create_run_folder(small)
    report_large_patch(small.folder, said.append)
    assert said == []
    for name in ("table.csv", "noise.bin"):
        (lab / "lab_of_mine" / name).write_bytes(os.urandom(600_000))
    large = plan_of(lab, "experiment.seed=7")
    create_run_folder(large)
    report_large_patch(large.folder, said.append)
    (line,) = said
    assert line.startswith(f"{large.folder.diff} has 1.")
    assert "lab_of_mine/noise.bin" in line
    assert "lab_of_mine/table.csv" in line
