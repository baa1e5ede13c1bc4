"""Accelerators: capacity, data-sheet peaks and sustained rates, one YAML file each in `device_table`.

Every group of values has a source in its file; unmeasured rates say so. Peaks are dense (no sparsity) with
fp32 accumulation; link rates are per device and direction.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError, did_you_mean, listed
from titan_exp.config.paths.yaml_file import read_yaml
from titan_exp.tracking.number_format import GIB


TABLE = Path(__file__).with_name("device_table")
"""Folder of the device files; a file's name is the device's command-line name."""


@dataclass(frozen=True)
class Device:
    """Accelerator, and the kernels that a run uses on it."""

    name: str
    memory: int
    """Memory in bytes, as the driver reports it to CUDA."""
    bf16_tflops: float
    """Dense bf16 peak, TFLOP/s; the denominator of MFU."""
    fp8_tflops: float | None
    """Dense fp8 peak, TFLOP/s; None without fp8 support."""
    gemm: Mapping[str, float]
    """Sustained TFLOP/s of large matmuls, by quantization recipe; `bf16` without one."""
    copy_tbs: float
    """Sustained bandwidth of copies, TB/s read plus written; passes over all weights reach it too (casts, norm,
    optimizer)."""
    elementwise_tbs: float
    """Sustained bandwidth of other elementwise kernels, TB/s."""
    link_gbs: float
    """Link to other devices of a node, GB/s."""
    network_gbs: float
    """Network, GB/s: the device's share of a node's adapters."""
    host_gbs: float = 64.0
    """Link to host memory, GB/s."""
    link_share: float = 1.0
    """Share of a link's rate that large messages reach."""
    message_us: float = 0.0
    """Latency of a message in microseconds."""
    link_hop_us: float = 0.0
    """Additional latency of a ring's hop within a node."""
    network_hop_us: float = 0.0
    """Additional latency of a ring's hop to another node."""
    launch_us: float = 0.0
    """Host time per operator in microseconds: Python, torch's dispatcher, kernel launch."""
    launches_ahead: bool = True
    """True if the host launches operators while the device computes, so that the slower of both counts."""
    attention: Mapping[str, Mapping[int, tuple[float, float]]] = field(default_factory=dict)
    """Sustained TFLOP/s of causal attention, forward and backward, by kernel and head size."""
    context_gib: float = 0.0
    """Memory of the CUDA context and its code, GiB."""
    communicator_gib: float = 0.0
    """Memory of NCCL's buffers per process group, GiB."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability; None without CUDA."""
    matmul_workspace: int = 0
    """Bytes of torch's cuBLAS workspace per thread; 0 if unknown."""
    multiprocessors: int = 132
    watts: int | None = None
    """Power limit of these rates."""
    bandwidth_tbs: float | None = None
    """Peak memory bandwidth, TB/s."""
    driver_names: tuple[str, ...] = ()
    """Names of the device as reported by drivers and torch."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Source of each group of values."""

    recipe: str = "float8_tensorwise"
    """Quantization recipe of the run's fp8 matmuls."""
    kernel: str = "cudnn"
    """Attention kernel of the run."""
    head_dim: int = 128
    """Head size of the run."""

    @property
    def matmul_rate(self) -> float:
        """Sustained FLOP/s of bf16 matmuls."""
        return self.gemm["bf16"] * 1e12

    @property
    def fp8_rate(self) -> float:
        """Sustained FLOP/s of the recipe's fp8 matmuls; tensorwise float8's for others, bf16's without fp8 support."""
        tflops = self.gemm.get(self.recipe, self.gemm.get("float8_tensorwise", self.gemm["bf16"]))
        return tflops * 1e12

    @property
    def attention_rates(self) -> tuple[float, float]:
        """Sustained FLOP/s of attention, forward and backward: the nearest head size of its kernel, else flash's; that
        of matmuls if neither is known."""
        by_size = self.attention.get(self.kernel, self.attention.get("flash"))
        if not by_size:
            return self.matmul_rate, self.matmul_rate
        forward, backward = by_size[min(by_size, key=lambda size: abs(size - self.head_dim))]
        return forward * 1e12, backward * 1e12

    @property
    def bandwidth(self) -> float:
        """Sustained bytes per second of elementwise kernels."""
        return self.elementwise_tbs * 1e12

    @property
    def copy_bandwidth(self) -> float:
        """Sustained bytes per second of copies and passes over all weights."""
        return self.copy_tbs * 1e12

    def launch_seconds(self, operators: float, compute: float) -> float:
        """Seconds that launching operators adds to `compute` seconds of their kernels."""
        host = operators * self.launch_us / 1e6
        return max(0.0, host - compute) if self.launches_ahead else host

    def overhead(self, process_groups: int = 0) -> int:
        """Bytes of a process beyond its tensors, with NCCL's buffers of `process_groups`."""
        return round((self.context_gib + process_groups * self.communicator_gib) * GIB)


def _read(path: Path) -> Device:
    values: dict[str, Any] = read_yaml(path, "a device")
    values["memory"] = round(values.pop("memory_gib") * GIB)
    values["capability"] = values["capability"] and tuple(values["capability"])
    values["driver_names"] = tuple(values["driver_names"])
    return Device(**values)


DEVICES = {path.stem: _read(path) for path in sorted(TABLE.glob("*.yaml"))}
"""Devices by command-line name."""


def device_named(name: str) -> Device:
    """Look up a device of the table. Raises UserError if the name is unknown."""
    if name.lower() not in DEVICES:
        known = did_you_mean(name, DEVICES) or f"known are {listed(DEVICES)}"
        raise UserError(f"--device {name}: unknown device; {known}.".replace("?.", "?"))
    return DEVICES[name.lower()]


def device_reported_as(name: str) -> str | None:
    """Command-line name of the device with this name in drivers and torch; None if it is not in the table."""
    return next((key for key, device in DEVICES.items() if name in device.driver_names), None)
