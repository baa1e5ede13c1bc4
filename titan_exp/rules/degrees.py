"""Rules about the mesh and the machine that it is laid over."""

from collections.abc import Iterator

from titan_exp.config.errors.did_you_mean import divisors, listed, nearest_numbers
from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.layout import device_type, offered_devices, world_size
from titan_exp.config.machine.local_machine import visible_gpus


def degrees_that_work(experiment: Experiment) -> Iterator[Violation]:
    """The other degrees have their places in the mesh, and wait there for a later version."""
    for axis in ("ep", "etp"):
        degree = getattr(experiment.parallelism, axis)
        if degree != 1:
            yield Violation(
                f"parallelism.{axis}",
                degree,
                "this version trains without expert parallelism",
                f"parallelism.{axis}=1; spread over ranks with parallelism.dp_shard={degree}",
            )


def devices_exist(experiment: Experiment) -> Iterator[Violation]:
    """The device that was asked for is here, in the number that was asked for."""
    cluster, here = experiment.cluster, visible_gpus()
    if cluster.is_remote:
        return
    if cluster.device == "cuda" and not here:
        yield Violation(
            "cluster.device",
            cluster.device,
            "this machine shows no GPU (CUDA_VISIBLE_DEVICES may hide them)",
            "cluster.device=cpu, or auto, which takes what there is",
        )
    elif cluster.gpus_per_node is not None and cluster.gpus_per_node > here:
        gpus = f"{here} GPU{'s' * (here != 1)}" if here else "no GPU"
        yield Violation(
            "cluster.gpus_per_node",
            cluster.gpus_per_node,
            f"this machine shows {gpus}",
            f"at most cluster.gpus_per_node={here}"
            if here
            else "cluster.gpus_per_node=null; on CPU the degrees ask for processes: parallelism.dp_shard="
            f"{cluster.gpus_per_node}",
        )
    if cluster.nodes != 1:
        yield Violation("cluster.nodes", cluster.nodes, "cluster=local is this machine alone", "cluster.nodes=1")


def ranks_fit(experiment: Experiment) -> Iterator[Violation]:
    """On CUDA every rank has a GPU of its own."""
    if experiment.cluster.is_remote or device_type(experiment.cluster) == "cpu":
        return
    offered, world = offered_devices(experiment.cluster), world_size(experiment)
    if offered and world > offered:
        parallelism = experiment.parallelism
        field = "dp_shard" if parallelism.dp_shard >= parallelism.dp_replicate else "dp_replicate"
        degree = getattr(parallelism, field)
        room = offered // (world // degree)
        works = listed(nearest_numbers(degree, [number for number in divisors(offered) if number <= room]))
        yield Violation(
            f"parallelism.{field}",
            degree,
            f"the degrees multiply to {world} processes, and {offered} GPU{'s are' if offered > 1 else ' is'} offered",
            f"parallelism.{field}={works}" if room else "lower the other degrees as well",
        )


def messages_are_not_captured(experiment: Experiment) -> Iterator[Violation]:
    """A CUDA graph would replay the messages between ranks, which nobody has shown to work here."""
    compile_, parallelism = experiment.compile, experiment.parallelism
    sharing = [
        f"parallelism.{axis}={getattr(parallelism, axis)}" for axis in ("cp", "tp") if getattr(parallelism, axis) > 1
    ]
    if sharing and compile_.compiles("blocks") and compile_.backend == "cudagraphs":
        yield Violation(
            "compile.backend",
            compile_.backend,
            f"with {listed(sharing, 'and')}, blocks hold messages between ranks, which CUDA graphs do not take",
            "compile.backend=inductor or aot_eager",
        )


RULES = (degrees_that_work, devices_exist, ranks_fit, messages_are_not_captured)
