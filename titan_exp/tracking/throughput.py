"""Throughput of the whole job, and the best rates of a device."""

import json
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_exp.config.devices import cpu_name
from titan_exp.tracking.display import GIB
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.run_folder.files import write_atomically

if TYPE_CHECKING:
    import torch


@dataclass
class TimeBreakdown:
    """Time of one attempt by activity in seconds, and tokens trained after warm-up."""

    warmup: float = 0.0  # first steps: compilation, allocation, autotuning
    training: float = 0.0  # steps after warm-up, up to the last reading
    tokens: int = 0  # tokens of the whole job trained in `training` seconds
    steps: int = 0  # optimizer steps in `training` seconds
    paused: dict[str, float] = field(default_factory=dict)  # pauses by reason, including those during warm-up


class Throughput:
    """Throughput between two readings, one per logged row. `devices` is the number of processes, `flops_per_token` the
    model's forward and backward FLOPs per token (6 × active parameters in matmuls + attention), `peak_tflops` the dense
    bf16 peak of one device; None makes the dependent metrics unknown. `synchronize` waits for the device; it is called
    at the ends of pauses and of warm-up, so that queued kernels are attributed correctly."""

    def __init__(
        self,
        *,
        devices: int,
        flops_per_token: float | None = None,
        peak_tflops: float | None = None,
        warmup_steps: int = 3,
        synchronize: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.spent = TimeBreakdown()
        self.devices, self._flops_per_token, self._peak_tflops = devices, flops_per_token, peak_tflops
        self._warmup_steps, self._synchronize, self._clock = warmup_steps, synchronize, clock
        self._window_start = clock()
        self._window_tokens = self._window_steps = 0
        self._window_paused = 0.0

    def step(self, tokens: int) -> None:
        """Count an optimizer step of the whole job on `tokens` tokens."""
        if self._warmup_steps > 0:
            self._warmup_steps -= 1
            if self._warmup_steps == 0:
                self._synchronize()
                self.spent.warmup += self._restart()
        else:
            self._window_tokens += tokens
            self._window_steps += 1

    @contextmanager
    def pause(self, reason: str) -> Iterator[None]:
        """Exclude the block from throughput and count its time under `reason`. Not reentrant."""
        self._synchronize()
        begin = self._clock()
        try:
            yield
        finally:
            self._synchronize()
            seconds = self._clock() - begin
            self._window_paused += seconds
            self.spent.paused[reason] = self.spent.paused.get(reason, 0.0) + seconds

    def read(self) -> dict[str, float | None]:
        """Throughput since the last reading, under the keys of a row; None if unmeasured or unknown. `tflops` is per
        device, `mfu` is `tflops` over the peak. Synchronize with the device before the call."""
        per_second = tflops = mfu = None
        if self._window_tokens > 0:
            tokens, steps = self._window_tokens, self._window_steps
            seconds = self._restart()
            self.spent.training += seconds
            self.spent.tokens += tokens
            self.spent.steps += steps
            per_second = tokens / seconds if seconds > 0 else None
        per_device = None if per_second is None else per_second / self.devices
        if per_device is not None and self._flops_per_token is not None:
            tflops = per_device * self._flops_per_token / 1e12
            mfu = None if self._peak_tflops is None else tflops / self._peak_tflops
        speeds = {"tokens_per_second": per_second, "tokens_per_second_per_device": per_device}
        return {**speeds, "tflops": tflops, "mfu": mfu}

    def _restart(self) -> float:
        """Start a new window; returns the seconds of the old one, without pauses."""
        now = self._clock()
        seconds = now - self._window_start - self._window_paused
        self._window_start, self._window_tokens, self._window_steps, self._window_paused = now, 0, 0, 0.0
        return seconds


class PeakMemory:
    """Peak memory of this rank since construction or `reset`, in GiB. CUDA: allocated and reserved bytes of the caching
    allocator. CPU: peak resident set of the process, which cannot be reset outside Linux."""

    def __init__(self, device: "torch.device") -> None:
        self._device = device
        self.reset()

    def reset(self) -> None:
        """Reset the peak to the current usage."""
        if self._device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            # Outside Linux, or in a sandbox, the peak covers the process lifetime.
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)

    def read(self) -> dict[str, float | None]:
        """Peaks under the keys of a row: `memory` and `memory_reserved` (None on a CPU)."""
        if self._device.type == "cuda":
            import torch

            allocated = torch.cuda.max_memory_allocated(self._device)
            reserved = torch.cuda.max_memory_reserved(self._device)
            return {"memory": allocated / GIB, "memory_reserved": reserved / GIB}
        return {"memory": _peak_resident() / GIB, "memory_reserved": None}


def _peak_resident() -> int:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        status = ""
    if found := re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE):
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# Dense bf16 matmul peak with fp32 accumulation, in TFLOP/s per torch device. Most data sheets list twice this rate,
# with sparsity. The whole name must match: a MIG slice or an unlisted variant is unknown.
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

MEASURED_SOURCE = "best {} matmul that titan-exp doctor measured here"  # source of a peak that is not from a data sheet


@dataclass(frozen=True)
class DeviceRates:
    """Measured rates of a device."""

    device: str
    when: str  # date and time, in UTC
    torch: str
    tflops: dict[str, float] = field(default_factory=dict)  # best matmul rate in TFLOP/s by dtype or recipe
    attention: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # causal, TFLOP/s by backend, head size
    copy: float | None = None  # device copy bandwidth, bytes read plus written, in GB/s (10⁹)
    link: float | None = None  # best all-reduce bus bandwidth of the machine, in GB/s; None for one device
    message_us: float | None = None  # time of the smallest all-reduce of the machine, in microseconds
    launch_us: float | None = None  # host time of an eager operator with autograd, in microseconds
    context_gib: float | None = None  # memory of the CUDA context, with the code of the kernels measured here, in GiB
    communicator_gib: float | None = None  # memory of NCCL's buffers per process group, in GiB
    rates: list[dict[str, Any]] = field(default_factory=list)  # all rates, as fields of `doctor.microbenchmarks`
    scheduler: list[str] = field(default_factory=list)  # SLURM partitions


@dataclass(frozen=True)
class PeakRate:
    """Peak rate of one device in TFLOP/s, the denominator of MFU."""

    tflops: float
    source: str  # configuration key, data sheet or measurement


def mfu_peak(device: "torch.device", configured: float | None, cache: Path) -> PeakRate | None:
    """Dense bf16 peak for MFU; None if unknown, with a warning on a GPU. It is the first known of `configured`
    (`cluster.peak_tflops`), the data sheet, and the best bf16 matmul that `titan-exp doctor` measured, from `cache`
    (the `.cache` of the runs). On a CPU only `configured` counts."""
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
        _warn_unknown(name)
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
    """Save measured rates; returns the file. Raises OSError if the disk is full or read-only."""
    path = rates_file(cache, measured.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(measured), indent=1) + "\n", durable=False)
    return path


def read_rates(cache: Path, device: str) -> DeviceRates | None:
    """Read the rates of a device; None if the file is missing or unreadable."""
    try:
        return DeviceRates(**json.loads(rates_file(cache, device).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def device_name(device: "torch.device") -> str:
    """Name of a GPU as torch reports it, or of the CPU with its number of cores."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    return cpu_name()


def peak_by_name(name: str) -> float | None:
    """Dense bf16 peak in TFLOP/s by torch device name; None if unknown."""
    return next((peak for pattern, peak in PEAK_TFLOPS if re.fullmatch(pattern, name)), None)


@cache
def _warn_unknown(name: str) -> None:
    remedy = "Set cluster.peak_tflops to its dense bf16 TFLOP/s."
    get_logger().warning("We do not know the bf16 peak of %r, so we report no MFU. %s", name, remedy)
