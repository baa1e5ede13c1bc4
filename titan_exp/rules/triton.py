"""Rules about our own Triton kernels: where they run, and what they take."""

import importlib.util
from collections.abc import Iterator

from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.machine.devices import device_type

BOTH_WAYS = ("float8_tensorwise", "float8_rowwise")
"""Recipes that use a matrix as it is and transposed, both times in float8."""


def one_pass_adamw(experiment: Experiment) -> Iterator[Violation]:
    """The kernel that clips and updates in one pass."""
    optimizer, field = experiment.optimizer, "optimizer.implementation"
    if optimizer.implementation != "triton":
        return
    if optimizer.name != "adamw":
        reason, remedy = f"it is a kernel of AdamW, and optimizer.name is {optimizer.name}", "optimizer.name=adamw"
    elif (lacking := lacking_triton(experiment)) is not None:
        reason, remedy = lacking
    elif experiment.parallelism.cpu_offload:
        reason = "it updates weights on the GPU, and parallelism.cpu_offload keeps them in the CPU's memory"
        remedy = "parallelism.cpu_offload=false"
    elif optimizer.state_precision not in ("fp32", "bf16"):
        reason = f"it keeps moments in fp32 or bf16, and optimizer.state_precision is {optimizer.state_precision}"
        remedy = "optimizer.state_precision=bf16"
    else:
        return
    yield Violation(field, "triton", reason, f"{field}=fused, or {remedy}" if remedy else f"{field}=fused")


def casts_both_ways(experiment: Experiment) -> Iterator[Violation]:
    """The kernel that casts to float8 as it is and transposed."""
    config, field = experiment.quantization, "quantization.fused_casts"
    if not config.fused_casts or config.recipe == "none":
        return
    if config.recipe not in BOTH_WAYS:
        reason = f"{config.recipe} does not use a matrix both as it is and transposed, or not in this format"
        remedy = f"quantization={BOTH_WAYS[0]} or {BOTH_WAYS[1]}"
    elif (lacking := lacking_triton(experiment)) is not None:
        reason, remedy = lacking
    elif config.emulate is True:
        reason, remedy = "quantization.emulate is true, and what is emulated is cast by torch", "emulate=auto"
    else:
        return
    yield Violation(field, True, reason, f"{field}=false, or {remedy}" if remedy else f"{field}=false")


def lacking_triton(experiment: Experiment) -> tuple[str, str] | None:
    """Why a kernel of ours cannot run, and what would help, which may be nothing; None where it can."""
    if device_type(experiment.cluster) != "cuda":
        return "Triton's kernels run on GPUs, and this run is on a CPU", ""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; torch for CUDA brings it", "pip install triton"
    return None


RULES = (one_pass_adamw, casts_both_ways)
