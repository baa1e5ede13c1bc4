"""A study in its own process with fake trainers: launched, failed, stopped, changed, run again."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launch.launching import LIMIT, ranks_of, start, wait_until
from titan_exp.cli.main import main
from titan_exp.compare.runs import select
from titan_exp.config.schema.typed_config import to_yaml
from titan_exp.launch.run_lookup import StudyFolder, find_runs
from titan_exp.launch.run_plan import RunPlan
from titan_exp.launch.run_status import status_rows

STUDY = """\
question: Are {steps} steps enough?
held_fixed: [model=llama_debug, cluster.device=cpu]
axes:
  - grid: {{training.steps: {steps}}}
seeds: {seeds}
baseline: {{training.steps: 2}}
metrics: {{loss: min}}
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working folder with a study."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweeps").mkdir()
    write()
    return tmp_path


def write(steps: str = "[2, 3]", seeds: str = "[0, 1]") -> None:
    Path("sweeps/mine.yaml").write_text(STUDY.format(steps=steps, seeds=seeds))


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    return process.returncode, out, err


def states() -> list[str]:
    return [row.state for row in status_rows(find_runs(["mine"], Path("runs")))]


def attempts() -> list[int]:
    return [len(run.folder.read_attempts()) for run in find_runs(["mine"], Path("runs"))]


def test_record_has_the_keys_and_choices_of_named_lists(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("sweeps/mine.yaml").write_text(
        "question: Which?\nheld_fixed: [model=llama_debug, cluster.device=cpu]\naxes:\n"
        "  - name: change\n    list:\n      none: []\n"
        "      both: [optimizer.weight_decay=0.2, training.max_grad_norm=2]\n"
        "  - grid: {training.steps: [2, 3]}\n"
    )
    monkeypatch.setattr("titan_exp.launch.sweep.sweeper._Sweep._submit", lambda *_: None)
    assert main(["sweep", "mine"]) == 0
    record = StudyFolder(home / "runs" / "mine").read()
    assert record is not None
    assert record.lists == {"change": ("optimizer.weight_decay", "training.max_grad_norm")}
    assert [point.choices["change"] for point in record.points] == ["none", "none", "both", "both"]


@pytest.mark.parametrize(("installed", "says"), [(False, "sbatch is not installed"), (True, "SLURM does not answer")])
def test_a_study_that_cannot_be_submitted_from_here_stays_as_it_was(
    installed: bool, says: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("titan_exp.launch.sweep.sweeper._Sweep._submit", lambda *_: None)
    assert main(["sweep", "mine"]) == 0
    before = {path: path.read_bytes() for path in (home / "runs" / "mine").rglob("*.*")}
    monkeypatch.setattr("shutil.which", lambda command: command if installed else None)
    monkeypatch.setattr("titan_exp.launch.slurm.squeue.subprocess.run", no_cluster)
    capsys.readouterr()
    assert main(["sweep", "mine", "cluster=slurm", "cluster.processes_per_node=1"]) == 2
    assert capsys.readouterr().err.count(says) == 1, "once, not at every point"
    assert {path: path.read_bytes() for path in (home / "runs" / "mine").rglob("*.*")} == before


@pytest.fixture
def made(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch makes the folders of its runs, and starts none."""

    def make(_: object, __: object, plans: Sequence[RunPlan], ___: object) -> None:
        for plan in plans:
            plan.folder.path.mkdir(exist_ok=True)
            plan.folder.config.write_text(to_yaml(plan.experiment))

    monkeypatch.setattr("titan_exp.launch.sweep.sweeper._Sweep._submit", make)


def standing() -> dict[str, str]:
    """Whether the last call asked for each run, or the study's file has lost it."""
    rows = reversed(status_rows(find_runs(["mine"], Path("runs"))))  # those asked for come first
    return {row.label: "removed" if row.removed else "asked" if row.asked else "not asked" for row in rows}


ALL = [f"steps={steps} seed={seed}" for steps in (2, 3) for seed in (0, 1)]


@pytest.mark.usefixtures("made")
def test_a_point_is_removed_if_the_file_has_lost_it_and_not_if_a_call_leaves_it_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["sweep", "mine"]) == 0
    assert standing() == dict.fromkeys(ALL, "asked")
    assert main(["sweep", "mine", "training.steps=3"]) == 0
    assert standing() == dict.fromkeys(ALL[2:], "asked") | dict.fromkeys(ALL[:2], "not asked")
    capsys.readouterr()
    assert main(["status", "mine"]) == 0
    said = capsys.readouterr().out
    assert "the last call, which did not ask for every run: titan-exp sweep mine training.steps=3\n" in said
    assert said.count("seed=0 (not in the last call)") == 1
    assert "(removed)" not in said
    notes = "\n".join(select(["mine"], Path("runs")).notes)
    assert "2 runs left out, not in the last call (titan-exp sweep mine training.steps=3): steps=2 seed=0 and" in notes
    assert [entry.label for entry in find_runs(["mine/steps=2"], Path("runs"))] == ALL[:2]

    # Points that only the command line had, and other values of the file's keys.
    assert main(["sweep", "mine", "experiment.seed=7", "training.steps=2"]) == 0
    assert main(["sweep", "mine", "training.seq_len=64"]) == 0
    alike = StudyFolder(Path("runs/mine")).read()
    assert alike is not None
    assert len(alike.others) == 5
    assert alike.removed == ()
    (found,) = find_runs(["mine/steps=2,seed=1"], Path("runs"))
    assert found.run.config["training"]["seq_len"] == 64, "the newest of two points of this label"

    # The file itself: a seed less, then it is back.
    write(seeds="[1]")
    assert main(["sweep", "mine"]) == 0
    left, lost = ["steps=2 seed=1", "steps=3 seed=1"], ["steps=2 seed=0", "steps=3 seed=0"]
    assert standing() == dict.fromkeys(left, "asked") | dict.fromkeys(lost, "removed") | {"steps=2 seed=7": "not asked"}
    write(seeds="[1, 0]")
    assert main(["sweep", "mine", "experiment.seed=1"]) == 0
    assert standing() == dict.fromkeys(left, "asked") | dict.fromkeys([*lost, "steps=2 seed=7"], "not asked")


@pytest.mark.usefixtures("made")
def test_a_record_of_the_first_release_is_read_and_its_narrowed_points_come_back(home: Path) -> None:
    """It wrote points that a call left out as removed ones."""
    assert main(["sweep", "mine"]) == 0
    assert main(["sweep", "mine", "training.steps=3"]) == 0
    path = home / "runs" / "mine" / "study.json"
    fields = json.loads(path.read_text())
    fields["removed"] = fields.pop("others")
    for point in (*fields["points"], *fields["removed"]):
        del point["typed"]
    path.write_text(json.dumps(fields))
    assert standing() == dict.fromkeys(ALL[2:], "asked") | dict.fromkeys(ALL[:2], "removed")
    assert main(["sweep", "mine", "training.steps=3"]) == 0
    assert standing() == dict.fromkeys(ALL[2:], "asked") | dict.fromkeys(ALL[:2], "not asked")


def no_cluster(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], 1, "", "squeue: error: resolve_ctls_from_dns_srv: no configuration source")


@pytest.mark.night
def test_study_from_start_to_end(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = finish(start("die_unless_lucky", "sweep", "mine"))
    assert code == 1
    assert "titan-exp logs mine" in out
    record = StudyFolder(home / "runs" / "mine").read()
    assert record is not None
    assert [point.label for point in record.points] == [f"steps={n} seed={seed}" for n in (2, 3) for seed in (0, 1)]
    assert (record.baseline, record.metrics) == ("steps=2", {"loss": "min"})
    assert len({point.experiment_id for point in record.points}) == 4
    assert states() == ["done", "failed", "done", "failed"]
    fields = json.loads((home / "runs" / "mine" / "study.json").read_text())
    assert set(fields) == {
        *("name", "question", "size", "typed", "baseline", "metrics", "points", "lists", "skipped", "removed", "time"),
        *("rounds", "parameters", "tune", "others", "registered", "dropped", "ladder"),
    }
    assert all((home / "runs" / "mine" / point["run_id"] / "config.yaml").exists() for point in fields["points"])

    assert main(["logs", "mine"]) == 0
    out = capsys.readouterr().out
    assert out.count("RuntimeError: seed 1 is unlucky") >= 2
    assert "steps=2 seed=0" not in out

    code, out, _ = finish(start("succeed", "retry", "mine/steps=2,seed=1"))
    assert (code, attempts()) == (0, [1, 2, 1, 1])
    assert states() == ["done", "done", "done", "failed"]

    # Once more: only what is missing is started, and a point that is new.
    write(steps="[2, 3, 4]", seeds="[0, 1]")
    code, out, _ = finish(start("succeed", "sweep", "mine", "--jobs", "2"))
    assert (code, out.count("already done")) == (0, 3)
    assert (states(), attempts()) == (["done"] * 6, [1, 2, 1, 2, 1, 1])
    assert sorted(path.name for path in (home / "runs" / "mine" / "history").iterdir()) == ["001.json", "001.yaml"]
    assert "[2, 3]" in (home / "runs" / "mine" / "history" / "001.yaml").read_text()
    capsys.readouterr()
    assert main(["sweep", "mine", "--dry-run"]) == 0
    assert "0 to start, 6 done." in capsys.readouterr().out
    assert main(["sweep", "mine"]) == 0
    assert (attempts(), len(list((home / "runs" / "mine" / "history").iterdir()))) == ([1, 2, 1, 2, 1, 1], 2)


@pytest.mark.night
def test_cancel_stops_active_runs_and_starts_none(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = start("obey_stop", "sweep", "mine")
    wait_until(lambda: any(home.glob("runs/mine/*/seen-0.json")))
    assert states() == ["running", "new", "new", "new"]
    assert main(["sweep", "mine"]) == 2
    assert "already running (sweep, process" in capsys.readouterr().err

    # The study changes while it is run.
    write(seeds="[1]")
    assert main(["sweep", "mine", "--dry-run"]) == 0
    assert "To cancel them, add --prune:\n  steps=2 seed=0" in capsys.readouterr().out
    assert main(["sweep", "mine", "--prune"]) == 2
    assert "add --yes" in capsys.readouterr().err
    write()
    assert main(["cancel", "mine"]) == 0
    said = capsys.readouterr().out
    assert "starts no further run" in said
    assert "steps=2 seed=0: asked to save and stop" in said
    code, out, _ = finish(sweep)
    assert code in (85, 130)
    assert "3 new" in out
    assert ranks_of(home) == []
    assert main(["cancel", "mine"]) == 0
    assert "No run is queued or running" in capsys.readouterr().out
    assert main(["retry", "mine"]) == 0
    assert "titan-exp sweep mine starts and continues those" in capsys.readouterr().out
    code, _, _ = finish(start("succeed", "sweep", "mine"))
    assert (code, states(), attempts()) == (0, ["done"] * 4, [2, 1, 1, 1])


@pytest.mark.night
def test_a_removed_point_is_pruned(home: Path) -> None:
    sweep = start("obey_stop", "sweep", "mine", "--jobs", "2")
    wait_until(lambda: len(list(home.glob("runs/mine/*/seen-0.json"))) == 2)
    write(seeds="[1]")
    code, out, err = finish(start("obey_stop", "sweep", "mine", "--prune", "--yes"))
    assert (code, "steps=2 seed=0: asked to save and stop" in out) == (2, True)
    assert "already running" in err
    wait_until(lambda: len(list(home.glob("runs/mine/*/saved-0"))) == 1)
    os.killpg(sweep.pid, signal.SIGINT)
    code, out, _ = finish(sweep)
    assert (code, "Stopping: every run saves its state first" in out) == (130, True)
    assert ranks_of(home) == []
    labels = [(run.label, run.removed) for run in find_runs(["mine"], Path("runs"))]
    assert labels[:2] == [("steps=2 seed=1", False), ("steps=3 seed=1", False)]
    assert ("steps=2 seed=0", True) in labels


@pytest.mark.usefixtures("cold")
def test_a_stop_before_a_launcher_has_begun_is_no_failure(home: Path) -> None:
    sweep = start("succeed", "sweep", "mine", "--jobs", "2")
    wait_until(lambda: len(list(home.glob("runs/mine/*/logs/launcher.log"))) == 2)
    os.kill(sweep.pid, signal.SIGINT)
    code, out, _ = finish(sweep)
    assert (code, out.count(": stopped before it started")) == (130, 2)
    assert "4 new" in out
    assert "The same command continues where this one stopped." in out
    assert "titan-exp logs" not in out


def test_killed_sweep_continues(home: Path) -> None:
    sweep = start("obey_stop", "sweep", "mine")
    wait_until(lambda: any(home.glob("runs/mine/*/seen-0.json")))
    sweep.kill()
    finish(sweep)
    wait_until(lambda: ranks_of(home) == [])  # they notice by themselves, and save
    code, out, _ = finish(start("obey_stop", "sweep", "mine", "experiment.seed=0", "training.steps=2"))
    assert code == 0
    (first, *_) = find_runs(["mine"], Path("runs"))
    assert (len(first.folder.read_attempts()), states()[0]) == (2, "done")
    assert out.rstrip().endswith("titan-exp compare mine")


def test_runs_that_outlive_their_sweep_say_so(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(seeds="[0]")
    sweep = start("obey_stop", "sweep", "mine", "--jobs", "2")
    wait_until(lambda: len(list(home.glob("runs/mine/*/seen-0.json"))) == 2)
    assert main(["status", "mine"]) == 0
    assert "killed" not in capsys.readouterr().out
    sweep.kill()
    finish(sweep)
    wait_until(lambda: all("was killed" in str(row.reason) for row in status_rows(find_runs(["mine"], Path("runs")))))
    assert states() == ["running", "running"]
    assert main(["status"]) == 0
    remedy = re.search(r"or stop what runs: titan-exp (cancel) (\S+)", capsys.readouterr().out)
    assert remedy is not None
    assert main(["sweep", "mine"]) == 0
    out = capsys.readouterr().out
    assert out.count("already running (launcher whose sweep was killed, process ") == 2
    assert "since an earlier command started them: 2 runs. Wait for the end (titan-exp status mine)" in out
    assert main([remedy[1], remedy[2]]) == 0
    wait_until(lambda: ranks_of(home) == [] and states() == ["preempted", "preempted"])


def test_full_disk_is_reported(home: Path) -> None:
    small = home / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(small)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this test needs the right to mount a small file system")
    try:
        (small / "ballast").write_bytes(bytes(60_000))
        code, _, err = finish(start("succeed", "sweep", "mine", f"paths.runs={small}"))
        assert code in (1, 2)
        assert "(No space left on device)" in err
        assert "Traceback" not in err
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
