"""CUDA's caching allocator: expandable segments, an environment variable of the ranks that torch reads once."""

from collections.abc import Mapping

from titan_exp.config.groups.activation_checkpoint import CompileConfig
from titan_exp.config.groups.cluster import ClusterConfig
from titan_exp.config.machine.devices import device_type

ALLOC_CONF = "PYTORCH_ALLOC_CONF"
"""Variable that torch 2.9 and later read first."""
EXPANDABLE = "expandable_segments:True"
USER_SETTINGS = (ALLOC_CONF, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables by which users set the allocator themselves."""
NCCL_REGISTRATION = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
"""Variable that registers segments with NCCL, which torch refuses for expandable ones."""


def uses_expandable_segments(cluster: ClusterConfig, compilation: CompileConfig) -> bool:
    """True if ranks allocate in expandable segments. Not with CUDA graphs, whose pools some versions of torch leave in
    fixed segments, and with which replays are reported to hang in others."""
    return cluster.expandable_segments and device_type(cluster) == "cuda" and not compilation.cuda_graphs


def allocator_environment(
    cluster: ClusterConfig, compilation: CompileConfig, environment: Mapping[str, str]
) -> dict[str, str]:
    """Variables to set before a rank starts CUDA; none if `environment` has settings of the user's."""
    own = any(name in environment for name in USER_SETTINGS)
    registered = environment.get(NCCL_REGISTRATION, "0").lower() not in ("", "0", "false", "n", "no")
    if own or registered or not uses_expandable_segments(cluster, compilation):
        return {}
    return {ALLOC_CONF: EXPANDABLE}
