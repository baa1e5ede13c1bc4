import logging
from pathlib import Path

import pytest
import torch

from titan_exp.tracking.throughput import PeakMemory, PeakRate, mfu_peak, peak_by_name


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA A100-PCIE-40GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40", 181.05),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI250X", 191.5),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_known_devices(name: str, peak: float) -> None:
    assert peak_by_name(name) == peak


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",  # a slice of a device
        "NVIDIA A100-SXM-64GB",  # made for one customer, with other clocks
        "NVIDIA H100",
        "NVIDIA H200x",
        "NVIDIA A10G",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "Frobnicator 9000",
    ],
)
def test_unlisted_device_is_unknown(name: str) -> None:
    assert peak_by_name(name) is None


def test_unknown_device_is_one_warning_with_the_key(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Frobnicator 9001")
    device = torch.device("cuda", 0)
    with caplog.at_level(logging.WARNING):
        assert mfu_peak(device, None, tmp_path) is None
        assert mfu_peak(device, None, tmp_path) is None
        assert mfu_peak(device, 123.0, tmp_path) == PeakRate(123.0, "cluster.peak_tflops")
    [warning] = caplog.messages
    assert "Frobnicator 9001" in warning
    assert "cluster.peak_tflops" in warning


def test_cpu_has_no_peak_and_no_warning(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    assert mfu_peak(torch.device("cpu"), None, tmp_path) is None
    assert mfu_peak(torch.device("cpu"), 0.5, tmp_path) == PeakRate(0.5, "cluster.peak_tflops")
    assert not caplog.messages


def test_peak_memory_of_a_cpu_is_the_resident_set_since_the_reset() -> None:
    memory = PeakMemory(torch.device("cpu"))
    before = _allocated(memory)
    block = bytearray(b"x" * 2**28)
    during = _allocated(memory)
    assert during - before > 0.2
    del block
    assert _allocated(memory) == pytest.approx(during, abs=0.05)  # still the peak
    memory.reset()
    after = _allocated(memory)
    if after > during - 0.05:
        pytest.skip("this system does not reset the peak resident set")
    assert after == pytest.approx(before, abs=0.1)


def _allocated(memory: PeakMemory) -> float:
    found = memory.read()
    assert found["memory"] is not None
    assert found["memory_reserved"] is None
    return found["memory"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_peak_memory_of_a_gpu_since_the_reset() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.init()  # torch resets no peak before
    memory = PeakMemory(device)
    block = torch.empty(2**28, dtype=torch.uint8, device=device)
    found = memory.read()
    assert found["memory"] is not None
    assert found["memory_reserved"] is not None
    assert 0.25 <= found["memory"] <= found["memory_reserved"]
    del block
    memory.reset()
    after = memory.read()["memory"]
    assert after is not None
    assert after <= found["memory"] - 0.25
