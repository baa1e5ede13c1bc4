"""Dense bf16 peaks of devices by their torch name, and peak memory of a rank."""

import re
import resource
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from titan_exp.config.machine.local_machine import cpu_name
from titan_exp.tracking.logging import get_logger

if TYPE_CHECKING:
    import torch

GIB = 1024**3

# Dense bf16 matmul peak with fp32 accumulation, in TFLOP/s per torch device. Data sheets mostly print twice this, "with
# sparsity". The whole name must match: a MIG slice or an unlisted variant is unknown.
PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    (r"(NVIDIA )?A100(-SXM4-|-PCIE-| )(40|80)GB( PCIe)?", 312.0),  # A100 data sheet
    (r"NVIDIA A800(-SXM4-|-PCIE-| )(40|80)GB( PCIe)?", 312.0),  # A800 data sheet: A100 with a slower NVLink
    (r"NVIDIA H100 (80|96)GB HBM3", 989.4),  # H100 SXM5: Hopper white paper, table of peak rates
    (r"NVIDIA H100 PCIe", 756.0),  # H100 PCIe data sheet: 1,513 with sparsity
    (r"NVIDIA H100 NVL", 835.5),  # H100 data sheet: 1,671 with sparsity
    (r"NVIDIA H800", 989.4),  # H100 SXM5 with a slower NVLink
    (r"NVIDIA H200", 989.4),  # H200 SXM data sheet: 1,979 with sparsity
    (r"NVIDIA H200 NVL", 835.5),  # H200 data sheet: 1,671 with sparsity
    (r"NVIDIA H20", 148.0),  # H20 data sheet
    (r"NVIDIA GH200 (120GB|144G HBM3e|480GB)", 989.4),  # GH200 data sheet: 1,979 with sparsity
    (r"NVIDIA B200", 2250.0),  # HGX B200 data sheet: 36 PFLOP/s of 8 with sparsity
    (r"NVIDIA GB200", 2500.0),  # GB200 NVL72 data sheet: 360 PFLOP/s of 72 with sparsity
    (r"NVIDIA L40S", 362.05),  # L40S data sheet
    (r"NVIDIA L40", 181.05),  # L40 data sheet
    (r"NVIDIA L4", 121.0),  # L4 data sheet: 242 with sparsity
    (r"NVIDIA A10", 125.0),  # A10 data sheet
    (r"NVIDIA A40", 149.7),  # A40 data sheet
    (r"NVIDIA RTX A6000", 154.8),  # RTX A6000 data sheet: 309.7 with sparsity
    (r"NVIDIA RTX 6000 Ada Generation", 364.25),  # RTX 6000 Ada data sheet: 728.5 with sparsity
    (r"NVIDIA GeForce RTX 3090", 71.0),  # GA102 white paper, bf16 with fp32 accumulation
    (r"NVIDIA GeForce RTX 4090", 165.2),  # Ada white paper, bf16 with fp32 accumulation
    (r"NVIDIA GeForce RTX 5090", 209.5),  # RTX Blackwell white paper, bf16 with fp32 accumulation
    (r"AMD Instinct MI250X", 191.5),  # MI250X data sheet: 383.0 of a card, which is two devices
    (r"AMD Instinct MI300A", 980.6),  # MI300A data sheet
    (r"AMD Instinct MI300X", 1307.4),  # MI300X data sheet
    (r"AMD Instinct MI325X", 1307.4),  # MI325X data sheet
)


def peak_tflops(device: "torch.device", configured: float | None = None) -> float | None:
    """Dense bf16 peak of one device in TFLOP/s; None on a CPU.

    `configured` (cluster.peak_tflops) takes precedence. A device missing from the table gives None and one warning.
    """
    if configured is not None or device.type != "cuda":
        return configured
    import torch

    name = torch.cuda.get_device_name(device)
    peak = peak_by_name(name)
    if peak is None:
        _warn_unknown(name)
    return peak


def device_name(device: "torch.device") -> str:
    """Name of a GPU as torch reports it, or of the CPU with its number of cores."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    return cpu_name()


def peak_by_name(name: str) -> float | None:
    """Dense bf16 peak in TFLOP/s by torch device name; None if unknown, never a guess."""
    return next((peak for pattern, peak in PEAK_TFLOPS if re.fullmatch(pattern, name)), None)


class PeakMemory:
    """Peak memory of this rank since construction or `reset`, in GiB.

    On CUDA the allocator's allocated and reserved bytes; on a CPU the peak resident set of the process, which cannot
    be reset outside Linux.
    """

    def __init__(self, device: "torch.device") -> None:
        self._device = device
        self.reset()

    def reset(self) -> None:
        """Reset the peak to the current usage."""
        if self._device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            _reset_peak_resident()

    def read(self) -> dict[str, float | None]:
        """Peaks under the keys of a row: `memory` and `memory_reserved` (None on a CPU)."""
        if self._device.type == "cuda":
            import torch

            allocated = torch.cuda.max_memory_allocated(self._device)
            reserved = torch.cuda.max_memory_reserved(self._device)
            return {"memory": allocated / GIB, "memory_reserved": reserved / GIB}
        return {"memory": _peak_resident() / GIB, "memory_reserved": None}


@cache
def _warn_unknown(name: str) -> None:
    get_logger().warning(
        "The bf16 peak of %r is not known, so MFU is not reported. Set cluster.peak_tflops to its dense bf16 TFLOP/s.",
        name,
    )


def _reset_peak_resident() -> None:
    # Outside Linux, or in a sandbox, the peak is that of the process lifetime.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)


def _peak_resident() -> int:
    """Peak resident set in bytes."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        status = ""
    if found := re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE):
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
