"""Memory gate of every launch: refusals and warnings, plan.json, and predicted columns of tables."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from titan_exp.cli import retry
from titan_exp.cli.main import main
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.launch.executor import SubmitOptions
from titan_exp.launch.local.executor import LocalExecutor
from titan_exp.launch.memory_gate import gate_run
from titan_exp.launch.run_plan import RunPlan, create_run_folder, plan_run
from titan_exp.plan import gate as gate_module
from titan_exp.plan.gate import GIB
from titan_exp.plan.prediction import NotPredicted, Prediction, RankPrediction
from titan_exp.tracking.run_folder.run import Run
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState

SMALL = ["model=llama_debug", "cluster.device=cpu", "training.steps=10", "plan.predict=always"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs folder of a machine with 4 GiB."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("titan_exp.plan.devices.host_memory", lambda: 4 * GIB)
    return tmp_path


@pytest.fixture
def foretold(monkeypatch: pytest.MonkeyPatch):
    """Stub predictor: 1 GiB per 32 tokens of a sequence; records its calls."""
    asked: list[int] = []

    def predict_many(questions, cache, echo=print):
        found: list[Prediction | NotPredicted] = []
        for question in questions:
            training = question.experiment.training
            asked.append(training.seq_len)
            if training.seq_len == 32:
                found.append(NotPredicted("its kernels are not modelled"))
                continue
            if training.seq_len == 48:
                found.append(NotPredicted("its user code fails", "Your own code fails:\n  mine.py:3, in forward"))
                continue
            size = round(training.seq_len / 32 * GIB * (training.micro_batch_size or 8) / 8)
            parts = {"activations": size // 2, "loss": size - size // 2}
            rank = RankPrediction(0, size, None, parts, "forward, block 1", None, 10)
            found.append(Prediction((rank,), 0.0, 0.5, 2048.0, None))
        return found

    monkeypatch.setattr(gate_module, "predict_many", predict_many)
    return asked


def planned(*overrides: str) -> RunPlan:
    words = [*SMALL, *overrides]
    return plan_run(to_experiment(compose(words)), words)


def test_a_dry_run_prints_what_is_predicted(home: Path, foretold, capsys: pytest.CaptureFixture[str]):
    assert main(["train", "--dry-run", *SMALL, "training.seq_len=64"]) == 0
    prediction, start = capsys.readouterr().out.splitlines()[-2:]
    assert prediction == "predicted: 2.42 GiB of this machine's 4 GiB; 0.5 s per step, 2,048 tokens/s"
    assert start.startswith("would start ")
    assert main(["train", "--dry-run", *SMALL, "training.seq_len=32"]) == 0
    assert "predicted: at most 1.06 GiB of this machine's 4 GiB\n" in capsys.readouterr().out
    assert main(["train", "--dry-run", *SMALL, "training.seq_len=32", "plan.gate=off"]) == 0
    assert "predicted:" not in capsys.readouterr().out


def test_refusal_suggests_changes_that_fit(home: Path, foretold, capsys: pytest.CaptureFixture[str]):
    assert main(["train", *SMALL, "training.seq_len=256"]) == 2
    said = capsys.readouterr().err
    assert (
        "This run does not fit: a rank needs 8.42 GiB at its peak (forward, block 1), and this machine has 4 GiB."
        in said
    )
    assert "Breakdown: loss 4 GiB, activations 4 GiB, process overhead 429 MiB." in said
    assert "training.micro_batch_size=2  2.42 GiB" in said
    assert "To start anyway, use plan.gate=warn" in said
    assert "Traceback" not in said
    assert not (home / "runs").exists()


def test_warning_and_plan_json(home: Path, foretold):
    said: list[str] = []
    found = gate_run(planned("training.seq_len=256", "plan.gate=warn"), said.append)
    assert len(said) == 1
    assert said[0].startswith("We do not expect this run to fit: a rank needs 8.42 GiB")
    create_run_folder(found)
    written = json.loads(found.folder.plan.read_text())
    assert (written["fits"], written["needed_bytes"]) == (False, 8 * GIB + 450_000_000)
    assert written["ranks"][0]["by_category"] == {"activations": 4 * GIB, "loss": 4 * GIB}
    prediction = Run(found.folder).predicted
    assert prediction.memory == pytest.approx(8 + 0.45e9 / GIB)
    assert prediction.tokens_per_second == 2048.0


def test_gate_changes_no_id_and_is_passed_once(home: Path, foretold):
    first, off = planned("training.seq_len=64"), planned("training.seq_len=64", "plan.gate=off", "plan.predict=needed")
    assert (first.run_id, first.experiment_id) == (off.run_id, off.experiment_id)
    assert gate_run(off, print) == off
    create_run_folder(first)
    first.folder.write_state(RunState("done", 10, 0.0, 1, None))
    assert gate_run(first, print) == first
    assert foretold == []
    assert not first.folder.plan.exists()
    # A run from before there was a gate is read as well, and is refused no less.
    assert replace(first.experiment, plan=off.experiment.plan) == off.experiment


@pytest.mark.night
def test_existing_folder_gets_the_newest_prediction(home: Path, foretold, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TITAN_EXP_RANK_MAIN", "tests.launch.fake_ranks.succeed")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    first = [gate_run(planned("training.seq_len=64", f"experiment.seed={seed}"), print) for seed in (1, 2)]
    for plan in first:
        create_run_folder(replace(plan, prediction="{}"))
    backend = LocalExecutor("local")
    assert [submission.outcome for submission in backend.submit(first, SubmitOptions(jobs=2))] == ["done", "done"]
    for plan in first:
        assert Run(plan.folder).predicted.tokens_per_second == 2048.0


def test_unpredictable_runs_share_one_line(home: Path, foretold):
    said: list[str] = []
    found = gate_run(planned("training.seq_len=32"), said.append)
    assert said == ["We could not check the memory: its kernels are not modelled."]
    create_run_folder(found)
    assert json.loads(found.folder.plan.read_text())["why_not_predicted"] == "its kernels are not modelled"
    assert Run(found.folder).predicted.memory is None


def test_failing_user_code_is_refused(home: Path, foretold, capsys: pytest.CaptureFixture[str]):
    assert main(["train", *SMALL, "training.seq_len=48"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("Your own code fails:\n  mine.py:3, in forward\n")
    assert "To start anyway, use plan.gate=warn" in said
    assert not (home / "runs").exists()
    warned: list[str] = []
    gate_run(planned("training.seq_len=48", "plan.gate=warn"), warned.append)
    assert "We expect this run to fail. Your own code fails:" in warned[-1]


def test_a_sweep_refuses_the_points_whose_user_code_fails(home: Path, foretold, capsys: pytest.CaptureFixture[str]):
    words = ["train", "-m", *SMALL, "training.seq_len=48,64", "--dry-run"]
    assert main(words) == 2
    said = "  Your own code fails:\n    mine.py:3, in forward\n    1 point: [training.seq_len=48]\n"
    assert said in capsys.readouterr().err
    assert main([*words, "--skip"]) == 0
    assert "1 to start, 1 skipped." in capsys.readouterr().out


@pytest.mark.parametrize("gate", ["needed", "unknown memory"])
def test_user_code_fails_in_the_child_process_and_nothing_starts(
    gate: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (home / "mine.py").write_text(
        "from torch import nn\n\n\nclass Mine(nn.Module):\n"
        "    def __init__(self, config):\n        super().__init__()\n        raise ValueError(config.dims)\n"
    )
    if gate == "unknown memory":
        monkeypatch.setattr("titan_exp.plan.devices.host_memory", lambda: None)
    assert main(["train", *SMALL[:3], "model.architecture=mine.Mine"]) == 2
    said = capsys.readouterr().err
    assert "model.architecture=mine.Mine fails before the run starts:\n" in said
    assert "mine.py:7, in __init__" in said
    assert "raise ValueError(config.dims)\n  AttributeError: 'Config' object has no attribute 'dims'" in said
    assert not (home / "runs" / "first").exists()


def test_damaged_plan_json(home: Path):
    folder = RunFolder(home)
    assert Run(folder).predicted.memory is None
    folder.plan.write_text("[1]")
    assert Run(folder).predicted.memory is None


def test_a_sweep_shows_predictions_and_refuses(home: Path, foretold, capsys: pytest.CaptureFixture[str]):
    words = ["train", "-m", *SMALL, "training.seq_len=64,96,256", "--dry-run"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "1 point of the sweep cannot run, so nothing has started." in said
    assert "  it does not fit: a rank needs 8.42 GiB" in said
    assert main([*words, "--skip"]) == 0
    out = capsys.readouterr().out
    (row,) = (line for line in out.splitlines() if line.startswith("training.seq_len=64"))
    assert row.split()[-3:] == ["2.42", "0.5", "1,024"]
    assert "Skipped:\n  it does not fit: a rank needs 8.42 GiB" in out
    assert "2 to start, 1 skipped." in out
    assert main([*words, "plan.gate=warn"]) == 0
    assert "not expect this run to fit" in capsys.readouterr().out


def test_a_study_skips_what_does_not_fit(home: Path, foretold, capsys: pytest.CaptureFixture[str]):
    (home / "sweeps").mkdir()
    (home / "sweeps" / "length.yaml").write_text(
        "question: How long?\n"
        f"held_fixed: [{', '.join(SMALL)}]\n"
        "axes:\n  - grid: {training.seq_len: [64, 256]}\n  - grid: {optimizer.lr: [1e-3, 2e-3]}\n"
    )
    assert main(["sweep", "length", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "2 to start, 2 skipped." in out
    reason, _, points = out.partition("Skipped:")[2].partition("2 points:")
    assert "it does not fit" in reason
    assert points.startswith(" [seq_len=256 lr=1e-3], [seq_len=256 lr=2e-3]\n")
    assert main(["sweep", "length", "training.seq_len=256", "--dry-run"]) == 2
    assert "no other is left" in capsys.readouterr().err


def test_deciding_bound_is_shown(home: Path, foretold, capsys: pytest.CaptureFixture[str]):
    words = ["model=llama_debug", "cluster.device=cpu", "training.seq_len=64,128", "--dry-run"]
    assert main(["train", "-m", *words]) == 0
    out = capsys.readouterr().out
    assert foretold == []
    assert out.count("< 1.") == 2
    assert "s/step" not in out.splitlines()[0]


def test_retry_passes_the_gate(home: Path, foretold, capsys: pytest.CaptureFixture[str]):
    made = planned("training.seq_len=256", "plan.gate=refuse")
    create_run_folder(made)
    folder = made.folder
    folder.add_attempt(world_size=1, hosts=["here"])
    folder.write_state(RunState("failed", 3, 0.0, 1, "out of memory"))
    with pytest.raises(UserError, match=r"a rank needs 8\.42 GiB"):
        retry.run([str(folder.path)])


def test_status_shows_predicted_beside_measured(home: Path, foretold, capsys: pytest.CaptureFixture[str]):
    found = gate_run(planned("training.seq_len=64"), print)
    create_run_folder(found)
    other = planned("training.seq_len=128")
    create_run_folder(other)
    row = {"step": 10, "tokens": 100, "loss": 2.0, "tokens_per_second": 1024.0, "memory": 2.5, "attempt": 1}
    for plan in (found, other):
        plan.folder.write_state(RunState("done", 10, 0.0, 1, None))
        plan.folder.metrics.write_text(json.dumps(row) + "\n")
    assert main(["status", str(found.folder.path), str(other.folder.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"/predicted", "GiB/predicted"} <= set(lines[0].split())
    (with_plan,) = (line for line in lines if found.run_id in line)
    assert {"50%", "2.50/2.42"} <= set(with_plan.split())
    assert main(["status", str(other.folder.path)]) == 0
    assert "predicted" not in capsys.readouterr().out.splitlines()[0]
