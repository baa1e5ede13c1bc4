"""titan-exp doctor: arguments, time limits, saved results, and unsupported measurements."""

import json
import time
from pathlib import Path

import pytest
import torch

from tests.faults import NO_MOUNTS, can_mount, read_only
from titan_exp.cli.main import main
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.extension import provided
from titan_exp.doctor import microbenchmarks, usage
from titan_exp.doctor.machine import machine_command
from titan_exp.doctor.microbenchmarks import (
    MAX_CALLS,
    MIN_CALLS,
    bandwidth,
    disk_rate,
    measure_rate,
    median_seconds,
    peak_of_type,
    scheduler,
)
from titan_exp.launch.local.ranks import run_on_ranks
from titan_exp.plan.devices import cpu_device
from titan_exp.tracking.throughput import device_name, rates_file, read_rates

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink the measurements to a second."""
    monkeypatch.setitem(microbenchmarks.GEMMS, "cpu", ((16, 16, 16), (32, 16, 32)))
    monkeypatch.setitem(microbenchmarks.ATTENTIONS, "cpu", ((1, 2, 1, 16, 16),))
    monkeypatch.setitem(microbenchmarks.COPY_BYTES, "cpu", 2**16)
    monkeypatch.setitem(microbenchmarks.SIZES, "cpu", (2**10, 2**12))


@pytest.mark.night
@pytest.mark.usefixtures("small")
def test_measurements_are_printed_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert machine_command(["--seconds", "1", "cluster.device=cpu", f"paths.runs={tmp_path}"], run_on_ranks) == 0
    out = capsys.readouterr().out
    for words in (
        "fp32 16×16×16",
        "bf16 32×16×32",
        "backward flash",
        "float8_rowwise 16×16×16",
        "eager operators",
        "write to",
        "2 ranks, gloo",
    ):
        assert words in out
    assert "not supported here" in out, "cuDNN runs on no CPU"
    assert "MFU: a CPU has none" in out
    kept = read_rates(tmp_path / ".cache", device_name(CPU))
    assert kept is not None
    assert f"saved in {rates_file(tmp_path / '.cache', device_name(CPU))}" in out
    assert kept.tflops["fp32"] > 0
    assert kept.copy is not None
    assert kept.link is not None
    forward, backward = kept.attention["flash"]["16"]
    assert forward > 0 < backward
    assert kept.launch_us is not None
    assert 0.1 < kept.launch_us < 1000
    assert kept.message_us is not None
    assert kept.message_us > 1
    assert kept.context_gib is None, "a CPU has none"
    device = cpu_device(device_name(CPU), tmp_path / ".cache", dtype="fp32", threads=1, processes=1)
    assert device is not None
    assert (device.launch_us, device.message_us) == (kept.launch_us, kept.message_us)
    assert list(tmp_path.iterdir()) == [tmp_path / ".cache"], "the file that was written is gone"


@pytest.mark.usefixtures("small")
def test_json_prints_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setattr("titan_exp.doctor.microbenchmarks.link_rates", lambda *_, **__: [])
    machine_command(["--seconds=1", "--json", "cluster.device=cpu", f"paths.runs={tmp_path}"], run_on_ranks)
    found = json.loads(capsys.readouterr().out)
    assert found["device"] == device_name(CPU)
    assert {rate["kind"] for rate in found["rates"]} == {"gemm", "attention", "copy", "launch", "disk"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sconds", "3"], "--sconds: unknown flag"),
        (["runs/first"], "runs/first: there is no such argument"),
        (["--seconds", "soon"], "seconds=soon: must be a number"),
        (["--seconds=0"], "at least 1"),
        (["--seconds=inf"], "at most 86400"),
        (["--seconds"], "--seconds needs a value"),
    ],
)
def test_invalid_arguments_are_refused(words: list[str], said: str):
    with pytest.raises(UserError, match=said):
        machine_command(words, run_on_ranks)


def test_help_covers_both_commands(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--help"]) == 0
    assert capsys.readouterr().out == f"{usage()}\n"
    assert all(name in usage() for name in provided("verbs") if name.startswith("doctor "))


def test_calls_are_repeated_within_the_limit_and_at_least_three_times():
    calls: list[float] = []
    median_seconds(lambda: calls.append(time.perf_counter()), CPU, 0.0)
    assert len(calls) == 1 + MIN_CALLS
    calls.clear()
    median_seconds(lambda: calls.append(time.perf_counter()), CPU, 60.0)
    assert len(calls) == 1 + MAX_CALLS


def test_backward_is_measured_without_forward(monkeypatch: pytest.MonkeyPatch):
    seconds = iter((1.0, 3.0))
    monkeypatch.setattr("titan_exp.doctor.microbenchmarks.median_seconds", lambda *_: next(seconds))
    forward, backward = microbenchmarks._attention_rates("flash", (1, 2, 1, 16, 16), CPU, 0.1)
    assert forward.value == pytest.approx(2e-12 * 2 * 16 * 16 * 16)
    assert forward.value is not None
    assert backward.value == pytest.approx(forward.value * 2.5 / 2), "five matmuls in two seconds"


def test_an_unsupported_measurement_has_a_reason():
    def fail() -> None:
        raise RuntimeError("no such kernel. A paragraph about it\nand a stack")

    rate = measure_rate("gemm", "x", fail, amount=1.0, unit="TFLOP/s", device=CPU, limit=0.1)
    assert (rate.value, rate.note) == (None, "not supported here: no such kernel")


@pytest.mark.skipif(not can_mount(), reason=NO_MOUNTS)
def test_a_read_only_disk_is_reported(tmp_path: Path):
    with read_only(tmp_path) as folder:
        rate = disk_rate(folder, 0.1)
    assert rate.value is None
    assert "Read-only file system" in rate.note


def test_the_scheduler_is_read_from_sinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tool = tmp_path / "sinfo"
    tool.write_text('#!/bin/sh\necho "gpu*: up, 4 nodes, gpu:8, at most 1-00:00:00"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert scheduler() == ["gpu*: up, 4 nodes, gpu:8, at most 1-00:00:00"]
    tool.write_text("#!/bin/sh\necho slurm_load_partitions: no controller >&2\nexit 1\n")
    assert scheduler() == []


def test_failing_links_do_not_end_the_other_measurements():
    def broken(*_: object) -> None:
        raise RuntimeError("a traceback\nrank 1: it died")

    (rate,) = microbenchmarks.link_rates(broken, ranks=2, device="cpu", limit=1.0)
    assert (rate.value, rate.note) == (None, "failed: rank 1: it died")


def test_data_sheets():
    assert bandwidth("NVIDIA H200") == 4800
    assert bandwidth("NVIDIA A100-SXM4-80GB") == 2039
    assert bandwidth("NVIDIA H100") is None, "no such name, and never a guess"
    assert peak_of_type(989.4, "bf16", (9, 0)) == 989.4
    assert peak_of_type(989.4, "float8_rowwise", (9, 0)) == 2 * 989.4
    assert peak_of_type(312.0, "mxfp8", (8, 0)) is None
    assert peak_of_type(989.4, "fp32", (9, 0)) is None
