"""What a run would be on: a device with its rates, and how much memory there is for how many of its processes.

Of a GPU the table knows both; what `titan-exp doctor` has measured goes before it, and is all that is known of a CPU.
What `titan-exp plan calibrate` has fitted is laid over either. Imports no torch.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from titan_exp.config.errors.did_you_mean import listed
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.machine.devices import device_type, node_size
from titan_exp.config.machine.local_machine import cpu_name, gpu_names, host_memory, usable_cores
from titan_exp.plan.calibrated_constants import read_constants
from titan_exp.plan.cuda.devices import DEVICES, Device
from titan_exp.tracking.device_rates import read_rates

CPU_OVERHEAD_GB = 0.45
"""What Python, torch and its allocator hold beside tensors in a rank's process on a CPU, as seen with torch 2.13, until
that is calibrated."""
NAMES = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "AMD Instinct MI300X": "mi300x",
}
"""Words of the device table by what drivers and torch call the device."""


@dataclass(frozen=True)
class DeviceMemory:
    """Where a run would be."""

    device: Device | None
    """Its rates; None where nothing is known of them."""
    capacity: int | None
    """Bytes of memory that `sharing` processes have together; None where that is not known."""
    sharing: int
    """Processes that share it: one on a GPU, those of a node on a CPU."""
    overhead: int
    """Bytes of each process beside what is predicted of it."""
    name: str
    """What has the memory, in words: `H100 80GB SXM`, `this machine`."""
    unknown: str = ""
    """Why the capacity is not known, and what would tell."""


def device_memory_of(experiment: Experiment, runs: Path) -> DeviceMemory:
    """Where an experiment would be.

    Args:
        experiment: the run, its layout resolved.
        runs: `paths.runs`, beside whose runs measured and fitted numbers are kept.
    """
    if device_type(experiment.cluster) == "cuda":
        return _gpu(experiment, runs / ".cache")
    return _cpu(experiment, runs / ".cache")


def cpu_device(name: str, cache: Path, *, dtype: str, threads: int, processes: int) -> Device | None:
    """A CPU as one process of several sees it; None where `titan-exp doctor` has not measured it.

    Args:
        name: of the CPU, as `cpu_name` has it.
        cache: `.cache` of the runs.
        dtype: of matmuls: `fp32` or `bf16`.
        threads: cores that the process computes on.
        processes: those of the machine, which share its bandwidth.
    """
    measured = read_rates(cache, name)
    if measured is None or dtype not in measured.tflops or measured.copy is None:
        return None
    cores = int(name.rpartition(", ")[2].partition(" ")[0])
    bandwidth = measured.copy / 1e3 / processes
    link = measured.link or measured.copy / 2
    memory = (host_memory() or 0) / 1e9
    device = Device(name, memory, measured.tflops[dtype] * min(1.0, threads / cores), None, bandwidth, link, link)
    # What doctor measured is reached, not promised.
    device = replace(device, matmul_share=1.0, bandwidth_share=1.0, link_share=1.0, overhead_gb=CPU_OVERHEAD_GB)
    return read_constants(cache, name).over(device)


def refine_gpu(device: Device, experiment: Experiment, cache: Path) -> Device:
    """A GPU of the table with what is known better: the links of `cluster`, measured rates, fitted constants.

    Args:
        device: of the table.
        experiment: whose cluster it is in.
        cache: `.cache` of the runs.
    """
    cluster = experiment.cluster
    given = {name: getattr(cluster, name) for name in ("link_gbs", "network_gbs") if getattr(cluster, name) is not None}
    device = replace(device, **given)
    names = [name for name, word in NAMES.items() if DEVICES[word].name == device.name]
    measured = next((found for name in names if (found := read_rates(cache, name)) is not None), None)
    if measured is not None:
        # The peaks stay the maker's, by which MFU is counted.
        reached = {
            "matmul_share": measured.tflops.get("bf16", 0) / device.bf16_tflops,
            "bandwidth_share": (measured.copy or 0) / 1e3 / device.bandwidth_tbs,
            "link_share": (measured.link or 0) / device.link_gbs,
        }
        device = replace(device, **{name: min(1.0, share) for name, share in reached.items() if share})
        if device.fp8_tflops is not None and {"bf16", "fp8"} <= set(measured.tflops):
            device = replace(device, fp8_reach=measured.tflops["fp8"] / device.fp8_tflops / device.matmul_share)
    return read_constants(cache, device.name).over(device)


def _gpu(experiment: Experiment, cache: Path) -> DeviceMemory:
    kind, asked = experiment.cluster.gpu_type, (experiment.cluster.gpu_type or "").lower()
    names = gpu_names() if experiment.cluster.kind == "local" and kind is None else []
    found = NAMES.get(names[0], "") if names and len(set(names)) == 1 else asked
    if found not in DEVICES:
        said = f"cluster.gpu_type={kind or 'null'}"
        if names:
            said = f"{listed(sorted(set(names)), 'and')} here, {said}"
        return DeviceMemory(None, None, 1, 0, "the GPU", f"{said}; the planner knows {listed(DEVICES, 'and')}")
    device = refine_gpu(DEVICES[found], experiment, cache)
    return DeviceMemory(device, round(device.memory_gb * 1e9), 1, round(device.overhead_gb * 1e9), device.name)


def _cpu(experiment: Experiment, cache: Path) -> DeviceMemory:
    world, cluster = ResolvedLayout.of(experiment).world_size, experiment.cluster
    processes, dtype = min(world, node_size(cluster, world)), experiment.training.mixed_precision
    if cluster.kind != "local":
        # The nodes are others than this machine.
        overhead = round(CPU_OVERHEAD_GB * 1e9)
        if cluster.memory_gb:
            return DeviceMemory(None, cluster.memory_gb * 2**30, processes, overhead, "a node's cluster.memory_gb")
        return DeviceMemory(
            None, None, processes, overhead, "a node", "a node's memory is not known; cluster.memory_gb says it"
        )
    name = cpu_name()
    threads = cluster.threads_per_process or max(1, usable_cores() // world)
    device = cpu_device(name, cache, dtype=dtype, threads=threads, processes=processes)
    constants = read_constants(cache, name)
    overhead = CPU_OVERHEAD_GB if constants.overhead_gb is None else constants.overhead_gb
    capacity = host_memory()
    unknown = "" if capacity else "the system does not say how much memory it has"
    return DeviceMemory(device, capacity, processes, round(overhead * 1e9), "this machine", unknown)
