"""Calibrated device constants, fitted by `titan-exp plan calibrate` and stored next to rates measured by `doctor`."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from titan_exp.plan.cuda.devices import Device
from titan_exp.tracking.device_rates import rates_file
from titan_exp.tracking.run_folder.atomic_write import write_atomically

FITTED = ("matmul_factor", "bandwidth_factor", "link_factor", "launch_us", "overhead_gb")
"""Fitted fields of `Device`."""


@dataclass(frozen=True)
class Constants:
    """Fitted constants; None keeps the device's value."""

    device: str = ""
    """Name of the device."""
    matmul_factor: float | None = None
    """See `Device.matmul_factor`."""
    bandwidth_factor: float | None = None
    """See `Device.bandwidth_factor`."""
    link_factor: float | None = None
    """See `Device.link_factor`."""
    launch_us: float | None = None
    """See `Device.launch_us`, in microseconds."""
    overhead_gb: float | None = None
    """See `Device.overhead_gb`, in GB."""
    runs: int = 0
    """Number of fitted runs."""
    when: str = ""
    """Date and time of the fit, in UTC."""

    def apply_to(self, device: Device) -> Device:
        """Device with the fitted constants applied."""
        fitted = {name: getattr(self, name) for name in FITTED if getattr(self, name) is not None}
        return replace(device, **fitted)


def constants_file(cache: Path, device: str) -> Path:
    """Path of a device's constants file."""
    return rates_file(cache, device).with_suffix(".calibration.json")


def read_constants(cache: Path, device: str) -> Constants:
    """Read a device's constants; all None if the file is missing or invalid."""
    try:
        return Constants(**json.loads(constants_file(cache, device).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return Constants()


def write_constants(cache: Path, constants: Constants) -> Path:
    """Write constants and return their file. Raises OSError if the disk is full or read-only."""
    path = constants_file(cache, constants.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(constants), indent=1) + "\n", durable=False)
    return path
