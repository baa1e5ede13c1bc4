"""The layout: how many processes run, and how the global batch is divided among them."""

from dataclasses import replace
from typing import Literal

from titan_exp.config.errors.did_you_mean import divisors, listed
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.cluster import ClusterConfig
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.parallelism import ParallelismConfig
from titan_exp.config.layout.pipeline_schedules import is_file, microbatches_of, read_schedule
from titan_exp.config.layout.pipeline_stages import chosen_microbatches
from titan_exp.config.machine.local_machine import visible_gpus

SMALLEST_GEMM = 4096
"""Inputs and outputs from which on float8 has been seen to pay for its casts (measured on an H200)."""


def device_type(cluster: ClusterConfig) -> Literal["cpu", "cuda"]:
    """The kind of device that processes compute on: what was asked for, or CUDA where this machine has a GPU.

    Of SLURM's nodes this machine knows nothing, so there a rule asks for a word.
    """
    if cluster.device != "auto":
        return cluster.device
    return "cuda" if visible_gpus() else "cpu"


def offered_devices(cluster: ClusterConfig) -> int:
    """Devices that the cluster group offers; a CPU machine offers one process."""
    if device_type(cluster) == "cpu":
        return 1
    return (cluster.nodes or 1) * (cluster.gpus_per_node or visible_gpus())


def node_size(cluster: ClusterConfig, world: int) -> int:
    """Processes of a full node, where `world` processes are started: one for each GPU."""
    if device_type(cluster) == "cpu":
        return cluster.processes_per_node or world
    return cluster.gpus_per_node or visible_gpus() or 1


def nodes_needed(experiment: Experiment) -> int:
    """Machines that a run's processes fill. The layout must be resolved."""
    world = world_size(experiment)
    return -(-world // node_size(experiment.cluster, world))


def resolve_layout(experiment: Experiment, offered: int) -> Experiment:
    """The experiment with `parallelism.dp_shard=-1` replaced by the number of offered devices that are left, and
    `quantization.smallest_gemm=null` by a number.

    Where fewer are offered than the other degrees ask for, nothing is left to shard over and it becomes 1: on a CPU
    machine explicit degrees ask for that many processes.

    Raises:
        UserError: the other degrees do not divide the offered devices.
    """
    experiment = _resolve_smallest_gemm(experiment)
    parallelism = experiment.parallelism
    if parallelism.dp_shard != -1:
        return experiment
    others = _degrees_but_shard(parallelism)
    if offered > others and offered % others:
        raise UserError("The layout does not fit.", [undivided(experiment, offered)])
    return replace(experiment, parallelism=replace(parallelism, dp_shard=max(1, offered // others)))


def _resolve_smallest_gemm(experiment: Experiment) -> Experiment:
    quantization = experiment.quantization
    if quantization.smallest_gemm is not None:
        return experiment
    emulated = quantization.emulate is True or device_type(experiment.cluster) == "cpu"
    smallest = 0 if emulated or quantization.recipe == "none" else SMALLEST_GEMM
    return replace(experiment, quantization=replace(quantization, smallest_gemm=smallest))


def undivided(experiment: Experiment, offered: int) -> Violation:
    """What to say where the other degrees leave a remainder of the offered devices."""
    others = _degrees_but_shard(experiment.parallelism)
    return Violation(
        "parallelism.dp_shard",
        -1,
        f"the other degrees multiply to {others}, which does not divide the {offered} devices offered",
        f"make them multiply to {listed(divisors(offered))}, or give parallelism.dp_shard a number",
    )


def world_size(experiment: Experiment) -> int:
    """Number of processes. The layout must be resolved."""
    assert experiment.parallelism.dp_shard > 0, "the layout is not resolved"
    return _degrees_but_shard(experiment.parallelism) * experiment.parallelism.dp_shard


def data_parallel_degree(experiment: Experiment) -> int:
    """Ranks that see different sequences. The layout must be resolved."""
    assert experiment.parallelism.dp_shard > 0, "the layout is not resolved"
    return experiment.parallelism.dp_replicate * experiment.parallelism.dp_shard


def micro_batch_size(experiment: Experiment) -> int:
    """Sequences per forward pass of one data rank. The layout must be resolved."""
    given = experiment.training.micro_batch_size
    if given:
        return given
    share = experiment.training.global_batch_size // data_parallel_degree(experiment)
    if experiment.parallelism.pp == 1:
        return share
    return share // (experiment.parallelism.pp_microbatches or chosen_microbatches(experiment, share))


def gradient_accumulation(experiment: Experiment) -> int:
    """Micro-batches that a data rank sums into one step. The layout must be resolved."""
    together = data_parallel_degree(experiment) * micro_batch_size(experiment)
    assert experiment.training.global_batch_size % together == 0, "checked by the rules"
    return experiment.training.global_batch_size // together


def exchanging_heads(parallelism: ParallelismConfig) -> int:
    """Of the ranks that share a sequence, how many neighbours exchange heads for sequence."""
    return parallelism.cp if parallelism.cp_method == "ulysses" else parallelism.cp_ulysses


def reshard_policy(parallelism: ParallelismConfig) -> Literal["always", "never", "all_but_last"]:
    """When a block frees its gathered parameters, `auto` decided."""
    if parallelism.reshard_after_forward != "auto":
        return parallelism.reshard_after_forward
    return "never" if parallelism.pp > 1 else "all_but_last"


def pipeline_microbatches(experiment: Experiment) -> int:
    """Micro-batches in one pass through the pipeline. The layout must be resolved."""
    parallelism = experiment.parallelism
    if is_file(parallelism.pp_schedule):
        return microbatches_of(read_schedule(parallelism.pp_schedule))
    return parallelism.pp_microbatches or gradient_accumulation(experiment)


def _degrees_but_shard(parallelism: ParallelismConfig) -> int:
    # Expert degrees are cut out of the others and start no process of their own.
    return parallelism.dp_replicate * parallelism.tp * parallelism.pp * parallelism.cp
