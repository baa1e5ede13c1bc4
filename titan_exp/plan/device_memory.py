"""Device and memory of a run: rates, capacity, number of processes that share it. Imports no torch.

GPU rates come from the device table, CPU rates from `titan-exp doctor`, whose rates of a GPU override the table.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import listed
from titan_exp.config.groups.cluster import ClusterConfig
from titan_exp.config.layout.axes import DEGREES
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.machine.devices import (
    cpu_name,
    gpu_memory_bytes,
    gpu_names,
    host_memory,
    node_size,
    process_threads,
)
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.parallel.expert_parallel.symmetric_room import symmetric_bytes
from titan_exp.plan.cuda.devices import DEVICES, Device, device_reported_as
from titan_exp.tracking.device_rates import DeviceRates, read_rates
from titan_exp.tracking.number_format import GIB

CPU_OVERHEAD_GB = 0.45
"""Default memory of a CPU rank beside its tensors, measured with torch 2.13: Python, torch and the processes that
launch a run; the heap keeps little of freed tensors (`return_freed_memory`)."""
SAVE_PROCESS_GB = 0.25
"""Memory of the process that writes with `checkpoint.mode=async_process`, measured with torch 2.13."""


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


def device_memory_of(layout: ResolvedLayout, spec: ModelSpec | None, runs: Path) -> DeviceMemory:
    """Device and memory of a run; `runs/.cache` holds measured rates."""
    cache = runs / ".cache"
    if layout.device_type == "cuda":
        return gpu_memory(layout.cluster, cache, layout, spec)
    return _cpu_memory(layout.cluster, layout.world_size, layout.training.mixed_precision, cache)


def room_of(layout: ResolvedLayout, spec: ModelSpec | None, device: Device) -> int:
    """Bytes of a GPU that the allocator may reserve for tensors."""
    return device.memory - overhead_of(layout, spec, device)


def overhead_of(layout: ResolvedLayout, spec: ModelSpec | None, device: Device) -> int:
    """Bytes of a GPU beside those tensors: the CUDA context, NCCL's buffers (a group of all ranks, and one per mesh
    axis), symmetric memory, and with async tensor parallelism workspaces of the matmul library for a second stream in
    each thread."""
    parallelism = layout.parallelism
    groups = (layout.world_size > 1) + sum(getattr(parallelism, name) > 1 for name in DEGREES)
    workspaces = 2 * device.matmul_workspace if parallelism.async_tp else 0
    return device.overhead(groups) + workspaces + symmetric_memory(layout, spec)


def symmetric_memory(layout: ResolvedLayout, spec: ModelSpec | None) -> int:
    """Bytes of symmetric memory: two pieces of a product for async tensor parallelism, or exchanged tokens."""
    parallelism, itemsize = layout.parallelism, 2 if layout.training.mixed_precision == "bf16" else 4
    if parallelism.async_tp:
        return 2 * math.prod(layout.hidden_shape) * itemsize
    if spec is None or not parallelism.symmetric_exchange:
        return 0
    tokens = layout.micro_batch_size * layout.training.seq_len // (parallelism.cp * parallelism.tp) * parallelism.etp
    shapes = {(router.moe.experts, router.moe.active_experts) for _, router in spec.routers()}
    ep, row = parallelism.ep, layout.width * itemsize
    return sum(symmetric_bytes(tokens, choices, experts // ep, ep, row) for experts, choices in shapes)


def cpu_device(name: str, cache: Path, *, dtype: str, threads: int, processes: int) -> Device | None:
    """Device of one of several processes on a CPU; None if `titan-exp doctor` has not measured the CPU.

    Matmuls run in `dtype` (`fp32` or `bf16`) on the process's `threads` cores; `processes` share the bandwidth.
    """
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
    """Device and memory of a run on GPUs; `cache` is `.cache` of the runs.

    The capacity of GPUs in this machine is the driver's; of others, that of the device table.
    """
    installed = gpu_names() if not cluster.is_remote and cluster.gpu_type is None else []
    key = (cluster.gpu_type or "").lower()
    if len(set(installed)) == 1:
        key = device_reported_as(installed[0]) or ""
    if key not in DEVICES:
        text = f"cluster.gpu_type={cluster.gpu_type or 'null'}"
        if installed:
            text = f"this machine has {listed(sorted(set(installed)), 'and')}, {text}"
        return DeviceMemory(None, None, 1, 0, "the GPU", f"{text}; the planner knows {listed(DEVICES, 'and')}")
    device = refine_gpu(DEVICES[key], cluster, cache)
    if installed and (present := gpu_memory_bytes()) is not None:
        device = replace(device, memory=present)
    return memory_of_gpu(device, layout, spec)


def memory_of_gpu(device: Device, layout: ResolvedLayout, spec: ModelSpec | None) -> DeviceMemory:
    """Memory of a GPU with one process of a run."""
    return DeviceMemory(device, device.memory, 1, overhead_of(layout, spec, device), device.name)


def _given(source: object, *names: str) -> dict[str, Any]:
    """Attributes of these names that are not None."""
    return {name: value for name in names if (value := getattr(source, name)) is not None}


def _attention(measured: DeviceRates, share: float = 1.0) -> dict[str, dict[int, tuple[float, float]]]:
    """Measured rates of attention, multiplied by the share of the device that a process has."""
    return {
        kernel: {int(size): (share * forward, share * backward) for size, (forward, backward) in by_size.items()}
        for kernel, by_size in measured.attention.items()
        if by_size
    }


def _cpu_memory(cluster: ClusterConfig, world: int, dtype: str, cache: Path) -> DeviceMemory:
    processes, overhead = min(world, node_size(cluster, world)), round(CPU_OVERHEAD_GB * 1e9)
    if cluster.is_remote:
        if not cluster.memory_gb:
            unknown = "the memory of a node is not known; set cluster.memory_gb"
            return DeviceMemory(None, None, processes, overhead, "a node", unknown)
        return DeviceMemory(None, cluster.memory_gb * GIB, processes, overhead, "a node (cluster.memory_gb)")
    name, processes = cpu_name(), processes * cluster.worlds
    device = cpu_device(name, cache, dtype=dtype, threads=process_threads(cluster, world), processes=processes)
    capacity = host_memory()
    unknown = "" if capacity else "the system does not report its memory"
    return DeviceMemory(device, capacity, processes, overhead, "this machine", unknown)
