"""The note at the end of a run: what is computed is right, and each number says where it is from."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.trainer.committed import committed
from titan_exp.launch.run_console import describe, summarize
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.tracking.throughput import DeviceRates, device_name, mfu_peak, read_rates, write_rates
from titan_exp.trainer.profiling.roofline_note import optimizer_traffic
from titan_exp.trainer.rank_main import main

CPU = torch.device("cpu")
SMALL = [
    "+experiment=smoke",
    "training.steps=8",
    "evaluation.every=0",
    "tracking.log_every=4",
    "checkpoint=none",
]


def finished(path: Path, *overrides: str) -> tuple[RunFolder, dict]:
    folder = committed(path, [*SMALL, "parallelism.dp_shard=1", *overrides])
    main(str(folder.path))
    return folder, json.loads(folder.roofline.read_text())


def test_the_traffic_of_adamw_is_28_bytes_a_weight_and_12_for_clipping():
    model = nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    counts = 2 * 4  # AdamW's count of steps, read and written
    assert optimizer_traffic(optimizer, clipped=True) == 100 * (8 + 16 + 16) + counts
    assert optimizer_traffic(optimizer, clipped=False) == 100 * (8 + 16 + 8) + counts


def test_without_a_known_peak_no_share_is_reported(tmp_path: Path):
    folder, note = finished(tmp_path / "runs" / "smoke" / "a")
    assert (note["peak_tflops"], note["copy_rate"], note["short"]) == (None, None, "")
    assert note["tflops"] > 0
    assert "%" not in describe(summarize(folder), 8)


def test_a_configured_peak_is_used_and_named(tmp_path: Path):
    folder, note = finished(tmp_path / "runs" / "smoke" / "a", "cluster.peak_tflops=0.5")
    assert (note["peak_tflops"], note["peak_source"]) == (0.5, "cluster.peak_tflops")
    from dataclasses import replace

    assert "% of 500 GFLOP/s (cluster.peak_tflops)" in describe(replace(summarize(folder), state="done"), 8)


def test_what_doctor_measured_is_used_and_named(tmp_path: Path):
    measured = DeviceRates(device_name(CPU), "now", torch.__version__, {"fp32": 0.25, "bf16": 0.5}, copy=10.0)
    write_rates(tmp_path / "runs" / ".cache", measured)
    _, note = finished(tmp_path / "runs" / "smoke" / "a")
    assert note["peak_tflops"] <= 0.25, "a rank's share of the cores"
    assert "best fp32 matmul that titan-exp doctor measured here" in note["peak_source"]
    assert note["copy_rate"] == 10.0


def test_the_peak_for_mfu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    write_rates(tmp_path, DeviceRates("NVIDIA H200", "now", "2", {"bf16": 700.0}))
    write_rates(tmp_path, DeviceRates("Unheard Of 9000", "now", "2", {"bf16": 70.0}))
    assert mfu_peak(gpu, 100.0, tmp_path).tflops == 100.0  # type: ignore[union-attr]
    assert mfu_peak(gpu, None, tmp_path).tflops == 989.4  # type: ignore[union-attr]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Unheard Of 9000")
    found = mfu_peak(gpu, None, tmp_path)
    assert found is not None
    assert (found.tflops, found.source) == (70.0, "best bf16 matmul that titan-exp doctor measured here")
    assert mfu_peak(gpu, None, tmp_path / "elsewhere") is None
    assert mfu_peak(CPU, None, tmp_path) is None


def test_a_broken_file_of_measurements_is_none(tmp_path: Path):
    path = write_rates(tmp_path, DeviceRates("a", "now", "2"))
    path.write_text("{")
    assert read_rates(tmp_path, "a") is None
    path.write_text('{"unknown": 1}')
    assert read_rates(tmp_path, "a") is None
