"""Triton kernel rules: supported devices, optimizers and recipes."""

from collections.abc import Iterator

from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.optimizer import AdamWConfig, OptimizerConfig
from titan_exp.config.groups.parallelism import DUAL_CAST_RECIPES, ParallelismConfig, QuantizationConfig
from titan_exp.config.machine.devices import has_triton
from titan_exp.rules.rule import rules


def fused_adamw_is_supported(
    optimizer: OptimizerConfig, parallelism: ParallelismConfig, device: str
) -> Iterator[Violation]:
    """The fused clip and AdamW kernel supports the device, options and precision."""
    field = "optimizer.implementation"
    if not isinstance(optimizer, AdamWConfig) or optimizer.implementation != "triton":
        return
    if optimizer.name != "adamw":
        reason, remedy = f"it is a kernel of AdamW, and optimizer.name is {optimizer.name}", "optimizer.name=adamw"
    elif (missing := missing_triton(device)) is not None:
        reason, remedy = missing
    elif parallelism.cpu_offload:
        reason = "it updates weights on the GPU, and parallelism.cpu_offload keeps them in CPU memory"
        remedy = "parallelism.cpu_offload=false"
    elif optimizer.state_precision not in ("fp32", "bf16"):
        reason = f"it keeps moments in fp32 or bf16, and optimizer.state_precision is {optimizer.state_precision}"
        remedy = "optimizer.state_precision=bf16"
    else:
        return
    yield Violation(field, "triton", reason, f"{field}=fused, or {remedy}" if remedy else f"{field}=fused")


def dual_cast_is_supported(quantization: QuantizationConfig, device: str) -> Iterator[Violation]:
    """The dual-cast kernel (a matrix and its transpose) supports the device and recipe."""
    field = "quantization.fused_casts"
    if quantization.fused_casts is not True or quantization.recipe == "none":
        return
    if not quantization.has_dual_casts:
        reason = f"{quantization.recipe} does not use a matrix and its transpose both in float8"
        remedy = f"quantization={DUAL_CAST_RECIPES[0]} or {DUAL_CAST_RECIPES[1]}"
    elif (missing := missing_triton(device)) is not None:
        reason, remedy = missing
    elif quantization.emulate is True:
        reason, remedy = "quantization.emulate is true, and emulation casts with torch", "emulate=auto"
    else:
        return
    yield Violation(field, True, reason, f"{field}=false, or {remedy}" if remedy else f"{field}=false")


def missing_triton(device: str) -> tuple[str, str] | None:
    """Reason why Triton kernels cannot run, and a possibly empty remedy; None if they can."""
    if device != "cuda":
        return "Triton kernels run on GPUs, and this run is on a CPU", ""
    if not has_triton():
        return "Triton is not installed; torch for CUDA brings it", "pip install triton"
    return None


TRITON_RULES = rules(fused_adamw_is_supported, dual_cast_is_supported)
