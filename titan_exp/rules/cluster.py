"""Rules about jobs of a scheduler: what it can be asked for, and processes that fill whole nodes."""

import re
from collections.abc import Iterator

from titan_exp.config.errors.did_you_mean import divisors, listed
from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.layout import device_type, node_size, nodes_needed, world_size

_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}")


def slurm_is_told_the_device(experiment: Experiment) -> Iterator[Violation]:
    """The machine that submits need not have what the nodes have."""
    if experiment.cluster.is_remote and experiment.cluster.device == "auto":
        yield Violation(
            "cluster.device",
            "auto",
            "this machine does not know what SLURM's nodes have",
            "cluster.device=cuda or cluster.device=cpu",
        )
    if experiment.cluster.is_remote and experiment.cluster.device == "cuda" and not _gpus(experiment):
        yield Violation(
            "cluster.gpus_per_node", None, "SLURM's nodes cannot be counted from here", "cluster.gpus_per_node=8"
        )


def slurm_understands(experiment: Experiment) -> Iterator[Violation]:
    """What is written into a batch script has the form that SLURM and the shell expect."""
    cluster = experiment.cluster
    if not cluster.is_remote:
        return
    if cluster.time_limit is not None and not _TIME.fullmatch(cluster.time_limit):
        reason = "SLURM has times as minutes, M:S, H:M:S, D-H or D-H:M:S"
        yield Violation("cluster.time_limit", cluster.time_limit, reason, "cluster.time_limit=24:00:00")
    for name in cluster.environment:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            reason = "this is no name of an environment variable"
            yield Violation("cluster.environment", name, reason, "letters, digits and `_`, no digit first")
    for field in ("sbatch_args", "srun_args"):
        for argument in getattr(cluster, field):
            if not argument.startswith("-") or "\n" in argument:
                reason = f"{argument!r} is no argument of its own: each begins with a dash and holds its value"
                yield Violation(f"cluster.{field}", argument, reason, f"cluster.{field}='[\"--nice=100\"]'")
    if cluster.stop_limit >= cluster.signal_lead:
        yield Violation(
            "cluster.stop_limit",
            cluster.stop_limit,
            f"the time limit comes {cluster.signal_lead} s after the request to stop, so nobody would be left to queue "
            "the run again",
            f"at most cluster.stop_limit={max(1, cluster.signal_lead - 1)}, or a longer cluster.signal_lead",
        )


def nodes_are_full(experiment: Experiment) -> Iterator[Violation]:
    """Every node runs the same number of processes, and as many nodes are asked for as the degrees fill."""
    cluster, world = experiment.cluster, world_size(experiment)
    if not cluster.is_remote or (device_type(cluster) == "cuda" and not _gpus(experiment)):
        return
    size = node_size(cluster, world)
    key = "processes_per_node" if device_type(cluster) == "cpu" else "gpus_per_node"
    if world > size and world % size:
        below = world // size * size
        yield Violation(
            f"cluster.{key}",
            size,
            f"the degrees multiply to {world} processes, which do not fill nodes of {size} evenly",
            f"degrees that multiply to {below} or {below + size}, or "
            f"cluster.{key}={listed([number for number in divisors(world) if number <= size])}",
        )
    elif cluster.nodes is not None and cluster.nodes != nodes_needed(experiment):
        needed = nodes_needed(experiment)
        yield Violation(
            "cluster.nodes",
            cluster.nodes,
            f"the degrees multiply to {world} processes, which fill {needed} node{'s' * (needed > 1)} of {size}",
            f"cluster.nodes=null, which asks for {needed}, or parallelism.dp_shard=-1, which fills "
            f"{cluster.nodes * size} processes",
        )


def _gpus(experiment: Experiment) -> int:
    return experiment.cluster.gpus_per_node or 0


RULES = (slurm_is_told_the_device, slurm_understands)
LAYOUT_RULES = (nodes_are_full,)
