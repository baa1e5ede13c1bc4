"""Device and memory of a run: rates, capacity, number of processes that share it. Imports no torch.

GPU rates come from the device table, CPU rates from `titan-exp doctor`. Measured rates override the table, and
constants of `titan-exp plan calibrate` override both.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from titan_exp.config.errors.did_you_mean import listed
from titan_exp.config.groups.cluster import ClusterConfig
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.machine.devices import node_size
from titan_exp.config.machine.local_machine import cpu_name, gpu_names, host_memory, usable_cores
from titan_exp.plan.calibrated_constants import read_constants
from titan_exp.plan.cuda.devices import DEVICES, Device
from titan_exp.tracking.device_rates import read_rates
from titan_exp.tracking.number_format import GIB

CPU_OVERHEAD_GB = 0.45
"""Default memory of Python, torch and its allocator in a CPU rank's process, measured with torch 2.13."""
DEVICE_KEYS = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "AMD Instinct MI300X": "mi300x",
}
"""Keys of the device table, by device name as reported by drivers and torch."""


@dataclass(frozen=True)
class DeviceMemory:
    """Device and memory capacity of a run."""

    device: Device | None
    """Device with its rates; None if unknown."""
    capacity: int | None
    """Bytes shared by `sharing` processes; None if unknown."""
    sharing: int
    """Processes that share the memory: one on a GPU, all of a node on a CPU."""
    overhead: int
    """Bytes per process in addition to predicted tensors."""
    name: str
    """Name of the device: `H100 80GB SXM`, `this machine`."""
    unknown: str = ""
    """Reason for an unknown capacity, and the key that sets it."""


def device_memory_of(layout: ResolvedLayout, runs: Path) -> DeviceMemory:
    """Device and memory of a run; `runs/.cache` holds measured rates and fitted constants."""
    cache = runs / ".cache"
    if layout.device_type == "cuda":
        return gpu_memory(layout.cluster, cache)
    return _cpu_memory(layout.cluster, layout.world_size, layout.training.mixed_precision, cache)


def cpu_device(name: str, cache: Path, *, dtype: str, threads: int, processes: int) -> Device | None:
    """Device of one of several processes on a CPU; None if `titan-exp doctor` has not measured the CPU.

    Matmuls run in `dtype` (`fp32` or `bf16`) on the process's `threads` cores; `processes` share the bandwidth.
    """
    measured = read_rates(cache, name)
    if measured is None or dtype not in measured.tflops or measured.copy is None:
        return None
    cores = int(name.rpartition(", ")[2].partition(" ")[0])
    bandwidth = measured.copy / 1e3 / processes
    link = measured.link or measured.copy / 2
    memory = (host_memory() or 0) / 1e9
    device = Device(name, memory, measured.tflops[dtype] * min(1.0, threads / cores), None, bandwidth, link, link)
    # Measured rates are already achieved rates.
    device = replace(device, matmul_share=1.0, bandwidth_share=1.0, link_share=1.0, overhead_gb=CPU_OVERHEAD_GB)
    return read_constants(cache, name).apply_to(device)


def refine_gpu(device: Device, cluster: ClusterConfig, cache: Path) -> Device:
    """GPU of the device table with its cluster's links, and with measured rates and fitted constants from `cache`."""
    links = {name: getattr(cluster, name) for name in ("link_gbs", "network_gbs") if getattr(cluster, name) is not None}
    device = replace(device, **links)
    names = [name for name, key in DEVICE_KEYS.items() if DEVICES[key].name == device.name]
    measured = next((found for name in names if (found := read_rates(cache, name)) is not None), None)
    if measured is not None:
        # Data-sheet peaks stay, since they define MFU.
        reached = {
            "matmul_share": measured.tflops.get("bf16", 0) / device.bf16_tflops,
            "bandwidth_share": (measured.copy or 0) / 1e3 / device.bandwidth_tbs,
            "link_share": (measured.link or 0) / device.link_gbs,
        }
        device = replace(device, **{name: min(1.0, share) for name, share in reached.items() if share})
        if device.fp8_tflops is not None and {"bf16", "fp8"} <= set(measured.tflops):
            device = replace(device, fp8_reach=measured.tflops["fp8"] / device.fp8_tflops / device.matmul_share)
    return read_constants(cache, device.name).apply_to(device)


def gpu_memory(cluster: ClusterConfig, cache: Path) -> DeviceMemory:
    """Device and memory of a run on GPUs; `cache` is `.cache` of the runs folder."""
    installed = gpu_names() if not cluster.is_remote and cluster.gpu_type is None else []
    key = (cluster.gpu_type or "").lower()
    if installed and len(set(installed)) == 1:
        key = DEVICE_KEYS.get(installed[0], "")
    if key not in DEVICES:
        text = f"cluster.gpu_type={cluster.gpu_type or 'null'}"
        if installed:
            text = f"this machine has {listed(sorted(set(installed)), 'and')}, {text}"
        return DeviceMemory(None, None, 1, 0, "the GPU", f"{text}; the planner knows {listed(DEVICES, 'and')}")
    device = refine_gpu(DEVICES[key], cluster, cache)
    return DeviceMemory(device, round(device.memory_gb * 1e9), 1, round(device.overhead_gb * 1e9), device.name)


def _cpu_memory(cluster: ClusterConfig, world: int, dtype: str, cache: Path) -> DeviceMemory:
    processes = min(world, node_size(cluster, world))
    if cluster.is_remote:
        overhead, unknown = round(CPU_OVERHEAD_GB * 1e9), "the memory of a node is not known; set cluster.memory_gb"
        if cluster.memory_gb:
            return DeviceMemory(None, cluster.memory_gb * GIB, processes, overhead, "a node (cluster.memory_gb)")
        return DeviceMemory(None, None, processes, overhead, "a node", unknown)
    name = cpu_name()
    threads = cluster.threads_per_process or max(1, usable_cores() // world)
    device = cpu_device(name, cache, dtype=dtype, threads=threads, processes=processes)
    fitted, capacity = read_constants(cache, name).overhead_gb, host_memory()
    overhead = round((CPU_OVERHEAD_GB if fitted is None else fitted) * 1e9)
    unknown = "" if capacity else "the system does not report its memory"
    return DeviceMemory(device, capacity, processes, overhead, "this machine", unknown)
