"""Devices of the cluster group: type and number, without torch."""

import importlib.util
from typing import Literal

from titan_exp.config.groups.cluster import ClusterConfig
from titan_exp.config.machine.cuda_support import torch_build
from titan_exp.config.machine.local_machine import usable_cores, visible_gpus


def device_type(cluster: ClusterConfig) -> Literal["cpu", "cuda"]:
    """Device type of `cluster.device`; `auto` is CUDA if this machine has a GPU. A rule rejects `auto` for SLURM."""
    if cluster.device != "auto":
        return cluster.device
    return "cuda" if visible_gpus() else "cpu"


def has_triton() -> bool:
    """True if Triton is installed where runs on GPUs take place: elsewhere, if this torch has no CUDA.

    Torch for CUDA brings it.
    """
    return importlib.util.find_spec("triton") is not None or torch_build()[1] is None


def offered_devices(cluster: ClusterConfig) -> int:
    """Number of devices for `parallelism.dp_shard=-1`, of each world of a run; a CPU machine offers one process."""
    if device_type(cluster) == "cpu":
        return 1
    devices = (cluster.nodes or 1) * (cluster.gpus_per_node or visible_gpus())
    # Worlds share this machine; elsewhere each has a job with nodes of its own.
    return devices if cluster.is_remote else devices // cluster.worlds


def process_threads(cluster: ClusterConfig, world_size: int) -> int:
    """Threads of each process of a run on this machine, whose cores all ranks of all worlds share."""
    return cluster.threads_per_process or max(1, usable_cores() // (world_size * cluster.worlds))


def node_size(cluster: ClusterConfig, world_size: int) -> int:
    """Processes on a full node: one per GPU; on CPU `cluster.processes_per_node`, or all processes."""
    if device_type(cluster) == "cpu":
        return cluster.processes_per_node or world_size
    return cluster.gpus_per_node or visible_gpus() or 1
