"""Accelerators, and a run's device: capacity, peaks, sustained rates and memory of its processes. Imports no torch.

Every group of values has a source in its file of `device_table`; unmeasured rates say so. Peaks are dense (no sparsity)
with fp32 accumulation; link rates are per device and direction. CPU rates come from `titan-exp doctor`, whose rates of
a GPU override the table.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from titan_exp.config.devices import cpu_name, gpu_memory_bytes, gpu_names, host_memory, node_size, process_threads
from titan_exp.config.errors.user_error import UserError, Violation, did_you_mean, listed
from titan_exp.config.foreign_file import read_yaml
from titan_exp.config.groups.run import ClusterConfig
from titan_exp.config.layout.axes import DEGREES
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.parallel.symmetric_room import symmetric_bytes
from titan_exp.tracking.display import GIB
from titan_exp.tracking.throughput import DeviceRates, read_rates

TABLE = Path(__file__).with_name("device_table")
"""Folder of the device files; a file's name is the device's command-line name."""


@dataclass(frozen=True)
class Device:
    """Accelerator, and the kernels that a run uses on it."""

    name: str
    memory: int  # memory in bytes, as the driver reports it to CUDA
    bf16_tflops: float
    fp8_tflops: float | None
    """Dense peaks, TFLOP/s; bf16's is the denominator of MFU, and fp8's is None without support."""
    gemm: Mapping[str, float]  # sustained TFLOP/s of large matmuls, by quantization recipe; `bf16` means no recipe
    copy_tbs: float
    """Sustained bandwidth of copies and passes over all weights (casts, norm, optimizer), TB/s read plus written."""
    elementwise_tbs: float
    link_gbs: float
    network_gbs: float  # network, GB/s: the device's share of a node's adapters
    host_gbs: float = 64.0  # link to host memory, GB/s
    link_share: float = 1.0  # share of a link's rate that large messages reach
    message_us: float = 0.0  # latency of a message in microseconds
    link_hop_us: float = 0.0
    network_hop_us: float = 0.0  # additional latency of a ring's hop within a node, and to another node
    launch_us: float = 0.0  # host time per operator in microseconds: Python, torch's dispatcher, kernel launch
    launches_ahead: bool = True
    """True if the host launches operators while the device computes, so that the slower of both counts."""
    attention: Mapping[str, Mapping[int, tuple[float, float]]] = field(default_factory=dict)
    """Sustained TFLOP/s of causal attention, (forward, backward), by kernel and head size."""
    context_gib: float = 0.0
    communicator_gib: float = 0.0
    """Memory of the CUDA context and its code, and of NCCL's buffers per process group, GiB."""
    capability: tuple[int, int] | None = None  # CUDA compute capability; None without CUDA
    matmul_workspace: int = 0  # bytes of torch's cuBLAS workspace per thread; 0 if unknown
    multiprocessors: int = 132
    watts: int | None = None  # power limit at which these rates hold
    bandwidth_tbs: float | None = None
    driver_names: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)

    recipe: str = "float8_tensorwise"
    kernel: str = "cudnn"
    head_dim: int = 128

    @property
    def matmul_rate(self) -> float:
        """Sustained FLOP/s of bf16 matmuls."""
        return self.gemm["bf16"] * 1e12

    @property
    def fp8_rate(self) -> float:
        """Sustained FLOP/s of the recipe's fp8 matmuls, else of tensorwise float8, else of bf16."""
        return 1e12 * self.gemm.get(self.recipe, self.gemm.get("float8_tensorwise", self.gemm["bf16"]))

    @property
    def attention_rates(self) -> tuple[float, float]:
        """Sustained FLOP/s of attention, forward and backward, at the nearest head size of its kernel. Without it,
        flash's rates count; without both, those of matmuls."""
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
        """Bytes of a process beyond its tensors, including NCCL's buffers of `process_groups`."""
        return round((self.context_gib + process_groups * self.communicator_gib) * GIB)


def _read(path: Path) -> Device:
    values: dict[str, Any] = read_yaml(path, "a device")
    values["memory"] = round(values.pop("memory_gib") * GIB)
    values["capability"] = values["capability"] and tuple(values["capability"])
    values["driver_names"] = tuple(values["driver_names"])
    return Device(**values)


DEVICES = {path.stem: _read(path) for path in sorted(TABLE.glob("*.yaml"))}


def device_named(name: str) -> Device:
    """Look up a device of the table. Raises UserError if the name is unknown."""
    if name.lower() not in DEVICES:
        known = did_you_mean(name, DEVICES) or f"use --device {listed(DEVICES)}"
        raise UserError("We cannot plan this run.", [Violation("--device", name, "unknown device", known)])
    return DEVICES[name.lower()]


def device_reported_as(name: str) -> str | None:
    """Command-line name of the device with this name in drivers and torch; None if it is not in the table."""
    return next((key for key, device in DEVICES.items() if name in device.driver_names), None)


CPU_OVERHEAD_GB = 0.45
"""Default memory of a CPU rank beside its tensors, measured with torch 2.13: Python, torch and the processes that
launch a run. The heap keeps little of freed tensors (`return_freed_memory`)."""
SAVE_PROCESS_GB = 0.25
"""Memory of the process that writes with `checkpoint.mode=async_process`, measured with torch 2.13."""


@dataclass(frozen=True)
class DeviceMemory:
    """Device and memory capacity of a run."""

    device: Device | None
    capacity: int | None  # bytes shared by `sharing` processes; None if unknown
    sharing: int  # number of processes that share the memory: one on a GPU, all of a node on a CPU
    overhead: int
    name: str  # name of the device: `H100 80GB SXM`, `this machine`
    unknown: str = ""  # reason for an unknown capacity, and the key that sets it


def device_memory_of(layout: ResolvedLayout, spec: ModelSpec | None, runs: Path) -> DeviceMemory:
    """Device and memory of a run; `runs/.cache` holds measured rates."""
    cluster, world, cache = layout.cluster, layout.world_size, runs / ".cache"
    if layout.device_type == "cuda":
        return gpu_memory(cluster, cache, layout, spec)
    processes, overhead = min(world, node_size(cluster, world)), round(CPU_OVERHEAD_GB * 1e9)
    if cluster.is_remote:
        if not cluster.memory_gb:
            unknown = "we do not know the memory of a node (set cluster.memory_gb)"
            return DeviceMemory(None, None, processes, overhead, "a node", unknown)
        return DeviceMemory(None, cluster.memory_gb * GIB, processes, overhead, "a node (cluster.memory_gb)")
    processes, dtype = processes * cluster.worlds, layout.training.mixed_precision
    device = cpu_device(cpu_name(), cache, dtype=dtype, threads=process_threads(cluster, world), processes=processes)
    capacity = host_memory()
    unknown = "" if capacity else "this machine does not report its memory"
    return DeviceMemory(device, capacity, processes, overhead, "this machine", unknown)


def room_of(layout: ResolvedLayout, spec: ModelSpec | None, device: Device) -> int:
    """Bytes of a GPU that the allocator may reserve for tensors."""
    return device.memory - overhead_of(layout, spec, device)


def overhead_of(layout: ResolvedLayout, spec: ModelSpec | None, device: Device) -> int:
    """Bytes of a GPU that are not for tensors: the CUDA context, NCCL's buffers (for all ranks, and for each mesh axis)
    and symmetric memory. Async tensor parallelism adds matmul workspaces for a second stream in each thread."""
    parallelism = layout.parallelism
    groups = (layout.world_size > 1) + sum(getattr(parallelism, name) > 1 for name in DEGREES)
    workspaces = 2 * device.matmul_workspace if parallelism.async_tp else 0
    return device.overhead(groups) + workspaces + symmetric_memory(layout, spec)


def symmetric_memory(layout: ResolvedLayout, spec: ModelSpec | None) -> int:
    """Bytes of symmetric memory: two pieces of a product for async tensor parallelism, or the exchanged tokens."""
    parallelism, itemsize = layout.parallelism, 2 if layout.training.mixed_precision == "bf16" else 4
    if parallelism.async_tp:
        return 2 * math.prod(layout.hidden_shape) * itemsize
    if spec is None or not parallelism.symmetric_exchange:
        return 0
    tokens = layout.micro_batch_size * layout.training.seq_len // (parallelism.cp * parallelism.tp) * parallelism.etp
    shapes = {(linear.experts, linear.active_experts) for linear in spec.expert_linears}
    ep, row = parallelism.ep, layout.width * itemsize
    return sum(symmetric_bytes(tokens, choices, experts // ep, ep, row) for experts, choices in shapes)


def cpu_device(name: str, cache: Path, *, dtype: str, threads: int, processes: int) -> Device | None:
    """CPU as the device of one of several processes; None if `titan-exp doctor` has not measured it. Matmuls run in
    `dtype` (`fp32` or `bf16`) on the process's `threads` cores; `processes` share the bandwidth."""
    measured = read_rates(cache, name)
    if measured is None or dtype not in measured.tflops or measured.copy is None:
        return None
    cores = int(name.rpartition(", ")[2].partition(" ")[0])
    share = min(1.0, threads / cores)
    matmul, bandwidth = measured.tflops[dtype] * share, measured.copy / 1e3 / processes
    link = measured.link or measured.copy / 2
    return Device(
        name,
        host_memory() or 0,
        matmul,
        None,
        {"bf16": matmul},
        bandwidth,
        bandwidth,
        link,
        link,
        message_us=measured.message_us or 0.0,
        launch_us=measured.launch_us or 0.0,
        launches_ahead=False,
        # Attention is measured in bf16.
        attention=_attention(measured, share) if dtype == "bf16" else {},
    )


def refine_gpu(device: Device, cluster: ClusterConfig, cache: Path) -> Device:
    """GPU of the device table with its cluster's links, and with measured rates from `cache`."""
    device = replace(device, **_given(cluster, "link_gbs", "network_gbs"))
    measured = next(filter(None, (read_rates(cache, name) for name in device.driver_names)), None)
    if measured is None:
        return device
    # Data-sheet peaks stay, since they define MFU.
    changed: dict[str, Any] = {
        "gemm": {**device.gemm, **measured.tflops},
        "attention": {**device.attention, **_attention(measured)},
        "sources": {**device.sources, "measured": f"titan-exp doctor, {measured.when}"},
    }
    if measured.copy is not None:
        share = device.elementwise_tbs / device.copy_tbs
        changed |= {"copy_tbs": measured.copy / 1e3, "elementwise_tbs": share * measured.copy / 1e3}
    if measured.link is not None:
        changed["link_share"] = min(1.0, measured.link / device.link_gbs)
    costs = ("message_us", "launch_us", "context_gib", "communicator_gib")
    return replace(device, **changed, **_given(measured, *costs))


def gpu_memory(cluster: ClusterConfig, cache: Path, layout: ResolvedLayout, spec: ModelSpec | None) -> DeviceMemory:
    """Device and memory of a run on GPUs; `cache` is `.cache` of the runs. The driver tells the capacity of GPUs
    here, the device table that of others."""
    installed = gpu_names() if not cluster.is_remote and cluster.gpu_type is None else []
    key = (cluster.gpu_type or "").lower()
    if len(set(installed)) == 1:
        key = device_reported_as(installed[0]) or ""
    if key not in DEVICES:
        text = f"cluster.gpu_type={cluster.gpu_type or 'null'}"
        if installed:
            text = f"this machine has {listed(sorted(set(installed)), 'and')}, and {text}"
        return DeviceMemory(None, None, 1, 0, "the GPU", f"{text}, and the planner only knows {listed(DEVICES, 'and')}")
    device = refine_gpu(DEVICES[key], cluster, cache)
    if installed and (present := gpu_memory_bytes()) is not None:
        device = replace(device, memory=present)
    return memory_of_gpu(device, layout, spec)


def memory_of_gpu(device: Device, layout: ResolvedLayout, spec: ModelSpec | None) -> DeviceMemory:
    """Memory of a GPU with one process of a run."""
    return DeviceMemory(device, device.memory, 1, overhead_of(layout, spec, device), device.name)


def _given(source: object, *names: str) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(source, name)) is not None}


def _attention(measured: DeviceRates, share: float = 1.0) -> dict[str, dict[int, tuple[float, float]]]:
    """Measured rates of attention, multiplied by the share of the device that a process has."""
    return {
        kernel: {int(size): (share * forward, share * backward) for size, (forward, backward) in by_size.items()}
        for kernel, by_size in measured.attention.items()
        if by_size
    }
