"""Calibration recovers the constants that generated the runs, and reports true errors."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from titan_exp.cli.main import main
from titan_exp.cli.plan_commands import calibrate
from titan_exp.cli.plan_commands.calibrate import calibrate_command
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.launch.run_plan import create_run_folder, plan_run
from titan_exp.plan.cuda.devices import DEVICES, Device
from titan_exp.plan.device_memory import constants_file, cpu_device, read_constants, refine_gpu, write_constants
from titan_exp.plan.plan_json import Prediction, RankPrediction
from titan_exp.plan.time.fit import Observation, fit, step_seconds
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState
from titan_exp.tracking.throughput import DeviceRates, write_rates

GIB = 2**30
TRUE = {"matmul_factor": 0.55, "bandwidth_factor": 0.3, "link_factor": 0.4, "launch_us": 12.0}
CPU = Device("Some CPU, 2 cores", 24 * GIB, 0.1, None, {"bf16": 0.1}, 0.04, 0.04, 4, 4, launches_ahead=False)


def observed(number: int, draw: random.Random, *, messages: bool = True, noise: float = 0.0) -> Observation:
    """A run generated with the true constants."""
    seconds = {
        "matmuls": draw.uniform(0.1, 1.0),
        "elementwise": draw.uniform(0.05, 0.3),
        "exposed": draw.choice([0.0, 0.1]) if messages else 0.0,
        "behind": draw.choice([0.0, 0.4]) if messages else 0.0,
        "operators": 0.0,
    }
    rank = RankPrediction(0, 2 * GIB + number * 2**20, None, {}, "", seconds, draw.randint(500, 20000))
    one = Observation(f"run {number}", Prediction((rank,), 0.2, 1.0, None, None), CPU, 1.0, 2.5 * GIB + number * 2**20)
    return replace(one, step_seconds=step_seconds(one, TRUE) * (1 + draw.uniform(-noise, noise)))


def test_the_constants_that_made_the_runs_are_found():
    draw = random.Random(0)
    found = fit([observed(number, draw) for number in range(12)])
    for name, rel in (("matmul_factor", 0.05), ("bandwidth_factor", 0.1), ("link_factor", 0.05), ("launch_us", 0.1)):
        assert found.constants[name] == pytest.approx(TRUE[name], rel=rel)
    assert found.constants["overhead_gb"] == pytest.approx(0.5 * GIB / 1e9, rel=1e-6)


def test_reported_errors_are_those_of_the_constants():
    draw = random.Random(1)
    runs = [observed(number, draw, noise=0.1) for number in range(10)]
    found = fit(runs)
    for place, one in enumerate(runs):
        assert found.after[place] == pytest.approx(step_seconds(one, found.constants))
        assert found.before[place] == pytest.approx(step_seconds(one, {}))
        others = fit([other for other in runs if other is not one])
        assert found.unseen[place] == pytest.approx(step_seconds(one, others.constants))
        assert found.memory_after[place] == pytest.approx(one.memory)

    def errors(guesses: Sequence[float]) -> list[float]:
        return sorted(abs(guess / one.step_seconds - 1) for guess, one in zip(guesses, runs, strict=True))

    assert errors(found.after)[-1] < 0.15 < errors(found.before)[5]


def test_constants_that_no_run_determines_stay():
    draw = random.Random(2)
    found = fit([observed(number, draw, messages=False) for number in range(8)])
    assert found.constants["link_factor"] == pytest.approx(CPU.link_factor, rel=1e-3)


def test_an_outlier_does_not_decide():
    draw = random.Random(3)
    runs = [observed(number, draw) for number in range(10)]
    runs[4] = replace(runs[4], step_seconds=3 * runs[4].step_seconds)
    assert fit(runs).constants["matmul_factor"] == pytest.approx(TRUE["matmul_factor"], rel=0.25)


def test_constants_replace_those_of_a_device(tmp_path: Path):
    assert read_constants(tmp_path, "H100 80GB SXM") == {}
    fitted = {"matmul_factor": 0.6, "overhead_gb": 2.0}
    path = write_constants(tmp_path, "H100 80GB SXM", fitted | {"runs": 5, "launch_us": None})
    assert path == constants_file(tmp_path, "H100 80GB SXM") == tmp_path / "doctor" / "h100-80gb-sxm.calibration.json"
    assert read_constants(tmp_path, "H100 80GB SXM") == fitted
    device = refine_gpu(DEVICES["h100"], to_experiment(compose([])).cluster, tmp_path)
    assert (device.matmul_factor, device.overhead_gb) == (0.6, 2.0)
    assert replace(device, matmul_factor=1.0, overhead_gb=None) == DEVICES["h100"]
    for damaged in ("{", "[]", '{"matmul_factor": "fast"}'):
        path.write_text(damaged)
        assert read_constants(tmp_path, "H100 80GB SXM") == {}


def test_a_measured_cpu_is_a_device(tmp_path: Path):
    assert cpu_device("Some CPU, 4 cores", tmp_path, dtype="fp32", threads=4, processes=1) is None
    attention = {"flash": {"64": [0.04, 0.03]}}
    rates = DeviceRates("Some CPU, 4 cores", "", "", {"fp32": 0.2}, attention, copy=40.0, link=3.0)
    write_rates(tmp_path, rates)
    assert cpu_device("Some CPU, 4 cores", tmp_path, dtype="bf16", threads=4, processes=1) is None
    whole = cpu_device("Some CPU, 4 cores", tmp_path, dtype="fp32", threads=4, processes=1)
    half = cpu_device("Some CPU, 4 cores", tmp_path, dtype="fp32", threads=2, processes=2)
    assert whole is not None
    assert half is not None
    assert (whole.bf16_tflops, half.bf16_tflops) == (0.2, 0.1)
    assert (whole.copy_tbs, half.copy_tbs, half.link_gbs) == (0.04, 0.02, 3.0)
    assert half.attention_rates == (half.matmul_rate, half.matmul_rate), "measured in bf16 only"
    write_rates(tmp_path, replace(rates, tflops={"bf16": 0.4}))
    halved = cpu_device("Some CPU, 4 cores", tmp_path, dtype="bf16", threads=2, processes=2)
    assert halved is not None
    assert halved.attention_rates == pytest.approx((0.02e12, 0.015e12))


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Factory of finished runs on a measured CPU, with a stub predictor."""
    monkeypatch.chdir(tmp_path)
    base = to_experiment(compose(["model=llama_debug", "cluster.device=cpu", "training.steps=10"]))

    def make(seq_len: int, seed: int = 0) -> RunFolder:
        changed = replace(base, training=replace(base.training, seq_len=seq_len))
        made = plan_run(replace(changed, experiment=replace(changed.experiment, seed=seed)))
        create_run_folder(made)
        made.folder.write_state(RunState("done", 10, 0.0, 1, None))
        # Twice the time that the rates allow.
        rows = [
            {"step": step, "tokens": 100, "loss": 2.0, "tokens_per_second": 8 * 1e3 / 2, "memory": 2.0, "attempt": 1}
            for step in range(1, 6)
        ]
        made.folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        env = json.loads(made.folder.env.read_text())
        made.folder.env.write_text(json.dumps({**env, "cpu": "Some CPU", "cores": 2, "cores_usable": 2, "gpus": []}))
        return made.folder

    def predict_many(questions, cache, say=print):
        found = []
        for question in questions:
            seconds = {"matmuls": question.experiment.training.seq_len / 1e3, "elementwise": 0.0}
            seconds |= {"exposed": 0.0, "behind": 0.0, "operators": 0.0}
            rank = RankPrediction(0, GIB, None, {}, "", seconds, 1)
            found.append(Prediction((rank,), 0.0, seconds["matmuls"], None, None))
        return found

    monkeypatch.setattr(calibrate, "predict_many", predict_many)
    return make


def test_the_verb_reports_errors_before_and_after(finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_rates(tmp_path / "runs" / ".cache", DeviceRates("Some CPU, 2 cores", "", "", {"fp32": 0.2}, copy=40.0))
    for seq_len in (64, 128, 256, 512):
        finished(seq_len)
    folder = finished(32)
    folder.write_state(RunState("failed", 3, 0.0, 1, None))
    assert main(["plan", "calibrate", "first", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "1 run(s) left out: not finished" in out
    assert "time before: median error 50.0%, worst 50.0%" in out
    assert "time after: median error 0." in out
    assert "matmul_factor: 1 -> 0.5" in out
    assert not constants_file(tmp_path / "runs" / ".cache", "Some CPU, 2 cores").exists()
    assert main(["plan", "calibrate"]) == 0
    fitted = read_constants(tmp_path / "runs" / ".cache", "Some CPU, 2 cores")
    assert fitted["matmul_factor"] == pytest.approx(0.5, rel=0.01)
    assert fitted["overhead_gb"] == pytest.approx(GIB / 1e9)
    written = json.loads(constants_file(tmp_path / "runs" / ".cache", "Some CPU, 2 cores").read_text())
    assert (written["device"], written["runs"], bool(written["when"])) == ("Some CPU, 2 cores", 4, True)


def test_too_few_runs_are_refused(finished, tmp_path: Path):
    for seed in range(5):
        finished(64, seed)
    with pytest.raises(UserError, match=r"5 left out: Some CPU, 2 cores has not been measured; run titan-exp doctor"):
        calibrate_command(["first"])
    write_rates(tmp_path / "runs" / ".cache", DeviceRates("Some CPU, 2 cores", "", "", {"fp32": 0.2}, copy=40.0))
    with pytest.raises(UserError, match="5 finished runs with 1 different predictions; a fit needs 4 that differ"):
        calibrate_command(["first"])


def test_runs_of_two_devices_are_not_mixed(finished, tmp_path: Path):
    for name in ("Some CPU, 2 cores", "Other CPU, 2 cores"):
        write_rates(tmp_path / "runs" / ".cache", DeviceRates(name, "", "", {"fp32": 0.2}, copy=40.0))
    finished(64)
    other = finished(128)
    other.env.write_text(json.dumps({**json.loads(other.env.read_text()), "cpu": "Other CPU"}))
    with pytest.raises(UserError, match=r"were on Other CPU, 2 cores and Some CPU, 2 cores\. Name runs on one kind"):
        calibrate_command(["first"])
