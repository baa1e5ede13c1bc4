"""The few constants that `titan-exp plan calibrate` fits for a device, kept beside what `titan-exp doctor` measured."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from titan_exp.plan.cuda.devices import Device
from titan_exp.tracking.device_rates import rates_file
from titan_exp.tracking.run_folder.atomic_write import write_atomically

FITTED = ("matmul_share", "bandwidth_share", "link_share", "operator_us", "overhead_gb")
"""Fields of a device that are fitted."""


@dataclass(frozen=True)
class Constants:
    """What was fitted of a device; None leaves the device's own."""

    device: str = ""
    """Name of the device."""
    matmul_share: float | None = None
    """As `Device.matmul_share`."""
    bandwidth_share: float | None = None
    """As `Device.bandwidth_share`."""
    link_share: float | None = None
    """As `Device.link_share`."""
    operator_us: float | None = None
    """As `Device.operator_us`, in microseconds."""
    overhead_gb: float | None = None
    """As `Device.overhead_gb`, in GB."""
    runs: int = 0
    """How many runs they were fitted to."""
    when: str = ""
    """Date and time, in UTC."""

    def over(self, device: Device) -> Device:
        """The device with these constants in place of its own."""
        fitted = {name: getattr(self, name) for name in FITTED if getattr(self, name) is not None}
        return replace(device, **fitted)


def constants_file(cache: Path, device: str) -> Path:
    """Where a device's constants are kept: beside its measured rates."""
    return rates_file(cache, device).with_suffix(".calibration.json")


def read_constants(cache: Path, device: str) -> Constants:
    """What was fitted of a device; nothing where nobody has, or the file cannot be read."""
    try:
        return Constants(**json.loads(constants_file(cache, device).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return Constants()


def write_constants(cache: Path, constants: Constants) -> Path:
    """Keep constants; returns the file.

    Raises:
        OSError: the disk is full, or cannot be written to.
    """
    path = constants_file(cache, constants.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(constants), indent=1) + "\n", durable=False)
    return path
