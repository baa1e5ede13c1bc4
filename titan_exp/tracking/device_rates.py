"""What `titan-exp doctor` found out about this machine, kept beside the runs, for MFU, notes and predictions."""

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
"""Source of a rate that no data sheet has."""


@dataclass(frozen=True)
class DeviceRates:
    """A device's measured rates."""

    device: str
    """The device's name."""
    when: str
    """Date and time, in UTC."""
    torch: str
    """Version of torch that measured."""
    tflops: dict[str, float] = field(default_factory=dict)
    """Best matmul rate in TFLOP/s by type: `bf16`, `fp32`, `fp8`."""
    copy: float | None = None
    """Bytes read and written in a copy within the device, in GB/s (10⁹)."""
    link: float | None = None
    """Best bus bandwidth of an all-reduce between the devices of the machine, in GB/s; None for one device."""
    rates: list[dict[str, Any]] = field(default_factory=list)
    """Every rate, as `trainer.machine.rate.Rate` has it."""
    scheduler: list[str] = field(default_factory=list)
    """Partitions that SLURM answered with."""


@dataclass(frozen=True)
class PeakRate:
    """What a device's achieved rate is divided by."""

    tflops: float
    """TFLOP/s of one device."""
    source: str
    """Where the number is from, in words."""


def mfu_peak(device: "torch.device", configured: float | None, cache: Path) -> PeakRate | None:
    """The dense bf16 peak for MFU: `cluster.peak_tflops`, else the data sheet's, else on a GPU that no table knows the
    best bf16 matmul that `titan-exp doctor` measured. None where all three are unknown, which is warned of on a GPU.

    Args:
        device: of this process.
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
    measured = read_rates(cache, name)
    if measured is not None and "bf16" in measured.tflops:
        return PeakRate(measured.tflops["bf16"], MEASURED_SOURCE.format("bf16"))
    peak_tflops(device)  # which warns
    return None


def matmul_rate(device: "torch.device", dtype: str, cache: Path) -> PeakRate | None:
    """The best matmul of a type that `titan-exp doctor` measured on this device; None where nobody has."""
    measured = read_rates(cache, device_name(device))
    if measured is None or dtype not in measured.tflops:
        return None
    return PeakRate(measured.tflops[dtype], MEASURED_SOURCE.format(dtype))


def rates_file(cache: Path, device: str) -> Path:
    """Where a device's rates are kept: `doctor/<device>.json` in the `.cache` of the runs, which every node sees."""
    return cache / "doctor" / f"{re.sub(r'[^A-Za-z0-9]+', '-', device).strip('-').lower() or 'device'}.json"


def write_rates(cache: Path, measured: DeviceRates) -> Path:
    """Keep what was measured; returns the file.

    Raises:
        OSError: the disk is full, or cannot be written to.
    """
    path = rates_file(cache, measured.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(measured), indent=1) + "\n", durable=False)
    return path


def read_rates(cache: Path, device: str) -> DeviceRates | None:
    """What was measured of a device; None where nobody has, or the file cannot be read."""
    try:
        return DeviceRates(**json.loads(rates_file(cache, device).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
