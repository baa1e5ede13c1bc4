"""Device rates measured by `titan-exp doctor` and kept beside the runs, for MFU, rooflines and predictions."""

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_exp.tracking.memory_stats import device_name, peak_by_name, peak_tflops
from titan_exp.tracking.run_folder.atomic_write import write_atomically

if TYPE_CHECKING:
    import torch

MEASURED_SOURCE = "best {} matmul that titan-exp doctor measured here"
"""Source of a peak that is not from a data sheet."""


@dataclass(frozen=True)
class DeviceRates:
    """Measured rates of a device."""

    device: str
    """Name of the device."""
    when: str
    """Date and time, in UTC."""
    torch: str
    """torch version used to measure."""
    tflops: dict[str, float] = field(default_factory=dict)
    """Best matmul rate in TFLOP/s by dtype: `bf16`, `fp32`, `fp8`."""
    copy: float | None = None
    """Device copy bandwidth, bytes read plus written, in GB/s (10⁹)."""
    link: float | None = None
    """Best all-reduce bus bandwidth between the devices of the machine, in GB/s; None for one device."""
    rates: list[dict[str, Any]] = field(default_factory=list)
    """All rates, as dictionaries of `doctor.timing.Rate`."""
    scheduler: list[str] = field(default_factory=list)
    """SLURM partitions."""


@dataclass(frozen=True)
class PeakRate:
    """Peak rate of a device, the denominator of MFU."""

    tflops: float
    """TFLOP/s of one device."""
    source: str
    """Origin of the number: a key, the data sheet or a measurement."""


def mfu_peak(device: "torch.device", configured: float | None, cache: Path) -> PeakRate | None:
    """Dense bf16 peak for MFU: `cluster.peak_tflops`, else the data sheet's, else the best bf16 matmul measured by
    `titan-exp doctor` on a GPU without a data sheet. None if all are unknown, with a warning on a GPU.

    Args:
        device: device of this process.
        configured: `cluster.peak_tflops`.
        cache: `.cache` of the runs.
    """
    if configured is not None:
        return PeakRate(configured, "cluster.peak_tflops")
    if device.type != "cuda":
        return None
    name = device_name(device)
    known = peak_by_name(name)
    if known is not None:
        return PeakRate(known, "data sheet")
    measured = matmul_rate(device, "bf16", cache)
    if measured is None:
        peak_tflops(device)  # warns
    return measured


def matmul_rate(device: "torch.device", dtype: str, cache: Path) -> PeakRate | None:
    """Best matmul rate of a dtype measured by `titan-exp doctor` on this device; None if unmeasured."""
    measured = read_rates(cache, device_name(device))
    if measured is None or dtype not in measured.tflops:
        return None
    return PeakRate(measured.tflops[dtype], MEASURED_SOURCE.format(dtype))


def rates_file(cache: Path, device: str) -> Path:
    """Path of a device's rates: `doctor/<device>.json` in the `.cache` of the runs, visible to every node."""
    return cache / "doctor" / f"{re.sub(r'[^A-Za-z0-9]+', '-', device).strip('-').lower() or 'device'}.json"


def write_rates(cache: Path, measured: DeviceRates) -> Path:
    """Save measured rates; returns the file.

    Raises:
        OSError: the disk is full or read-only.
    """
    path = rates_file(cache, measured.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(measured), indent=1) + "\n", durable=False)
    return path


def read_rates(cache: Path, device: str) -> DeviceRates | None:
    """Read the rates of a device; None if there are none, or the file is unreadable."""
    try:
        return DeviceRates(**json.loads(rates_file(cache, device).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
