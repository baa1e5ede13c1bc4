"""Mesh degree rules, and devices of the machine."""

from collections.abc import Iterator

from titan_exp.config.errors.user_error import Violation, divisors, listed, nearest_numbers
from titan_exp.config.groups.parallelism import CompileConfig, ParallelismConfig
from titan_exp.config.groups.run import ClusterConfig
from titan_exp.config.layout.axes import BLOCK_DEGREES
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.machine.devices import offered_devices
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.rules.rule import Refuse, rules


def auto_finds_what_is_there(cluster: ClusterConfig, unusable_cuda: tuple[str, str] | None) -> Iterator[Violation]:
    """`auto` does not fall back to the CPU beside a GPU or driver that torch cannot use."""
    if cluster.device == "auto" and unusable_cuda is not None:
        yield Violation("cluster.device", "auto", *unusable_cuda)


def ranks_have_gpus(
    cluster: ClusterConfig, parallelism: ParallelismConfig, layout: ResolvedLayout, device: str
) -> Iterator[Violation]:
    """On CUDA, every rank has its own GPU."""
    offered, world = offered_devices(cluster), layout.world_size
    if device == "cuda" and offered and world > offered and cluster.worlds == 1:
        field = "dp_shard" if parallelism.dp_shard >= parallelism.dp_replicate else "dp_replicate"
        degree = getattr(parallelism, field)
        room = offered // (world // degree)
        works = listed(nearest_numbers(degree, [number for number in divisors(offered) if number <= room]))
        reason = f"the degrees multiply to {world} processes, and {offered} GPU{'s' * (offered > 1)} can be used"
        remedy = f"parallelism.{field}={works}" if room else "lower the other degrees as well"
        yield Violation(f"parallelism.{field}", degree, reason, remedy)


def model_is_divided_so(spec: ModelSpec, parallelism: ParallelismConfig) -> Iterator[Violation]:
    """The model can be divided along every axis of the layout."""
    for unsupported in spec.unsupported:
        axis = unsupported.key.removeprefix("parallelism.")
        degree = getattr(parallelism, axis)
        if degree > 1:
            remedy = f"{unsupported.key}=1 parallelism.dp_shard={degree}"
            yield Violation(unsupported.key, degree, unsupported.reason, remedy)


def collectives_are_not_captured(compile: CompileConfig, parallelism: ParallelismConfig) -> Iterator[Violation]:
    """CUDA graphs of compiled blocks contain no collectives; replaying them is untested."""
    degrees = {key: getattr(parallelism, key) for key in BLOCK_DEGREES}
    used = [f"parallelism.{key}={degree}" for key, degree in degrees.items() if degree > 1]
    if used and compile.compiles("blocks") and compile.backend == "cudagraphs":
        reason = f"with {listed(used, 'and')}, blocks contain collectives, which CUDA graphs do not take"
        yield Violation("compile.backend", compile.backend, reason, "compile.backend=inductor or aot_eager")


DEGREE_RULES = (
    *rules(
        Refuse(
            "cluster.device",
            lambda cluster, gpus: cluster.device == "cuda" and not gpus,
            "this machine shows no GPU (CUDA_VISIBLE_DEVICES may hide them)",
            "cluster.device=cpu, or auto, which takes the device that exists",
        ),
        Refuse(
            "cluster.gpus_per_node",
            lambda cluster, gpus: 0 < gpus < (cluster.gpus_per_node or 0),
            "this machine shows {gpus} GPU(s)",
            "at most cluster.gpus_per_node={gpus}",
        ),
        Refuse(
            "cluster.gpus_per_node",
            lambda cluster, gpus: not gpus and cluster.gpus_per_node is not None and cluster.device != "cuda",
            "this machine shows no GPU",
            "on CPU the degrees ask for processes: cluster.gpus_per_node=null "
            "parallelism.dp_shard={cluster.gpus_per_node}",
        ),
        Refuse(
            "cluster.nodes",
            lambda cluster: cluster.nodes != 1,
            "cluster=local is this machine alone",
            "cluster.nodes=1",
        ),
        auto_finds_what_is_there,
        ranks_have_gpus,
        when=lambda cluster: not cluster.is_remote,
    ),
    *rules(collectives_are_not_captured, model_is_divided_so),
)
