"""Options that the planner supports, checked without importing torch so that errors come fast."""

from collections.abc import Iterator
from dataclasses import replace

from titan_exp.config.devices import device_type
from titan_exp.config.errors.user_error import UserError, Violation, listed
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.torch_features import ATTENTION_BACKEND, auto_backend
from titan_exp.models.spec.lookup import attention_backend, model_spec
from titan_exp.plan.cuda.devices import Device

BACKENDS = ("inductor", "aot_eager", "eager")
"""Backends of torch.compile that run on fake tensors."""

HOPPER = (9, 0)
"""First CUDA capability on which `auto` chooses cuDNN's attention."""

BLACKWELL = (10, 0)
"""First CUDA capability with NVFP4 instructions."""

WHY_NOT = {
    "fa3": "we do not know how much workspace its package takes",
    "fa4": "we do not know how much workspace its package takes",
    "flex": "we trace runs on a CPU, where FlexAttention has no backward pass",
}
"""Reason by unsupported attention backend."""


def check_supported(experiment: Experiment, device: Device | None = None) -> None:
    """Raise UserError if the planner does not support an option of a run, or a kernel on a known GPU."""
    if found := list(_violations(experiment, device)):
        raise UserError("We cannot plan this run.", found)


def _violations(experiment: Experiment, device: Device | None) -> Iterator[Violation]:
    compiled = experiment.compile
    if compiled.enabled and compiled.backend not in BACKENDS:
        remedy = f"use compile.backend={listed(BACKENDS)}, or compile=none"
        yield Violation("compile.backend", compiled.backend, "we do not know the memory of this backend", remedy)
    if device_type(experiment.cluster) != "cuda":
        return
    backend = attention_backend(experiment.model)
    if backend in WHY_NOT:
        yield Violation(ATTENTION_BACKEND, backend, WHY_NOT[backend], f"use {ATTENTION_BACKEND}=auto or math")
    if backend == "cudnn" and experiment.data.document_mask:
        reason = "data.document_mask is true, and we do not know cuDNN's workspace with a mask"
        yield Violation(ATTENTION_BACKEND, backend, reason, f"use {ATTENTION_BACKEND}=auto")
    if device is None:
        return
    if device.capability is None and attention_kernel(experiment) == "efficient":
        reason = f"fp32 and document masks need the efficient kernel, and we do not know the one of {device.name}"
        yield Violation(ATTENTION_BACKEND, backend, reason, f"use {ATTENTION_BACKEND}=math")
    quantization = experiment.quantization
    instructed = device.capability is not None and device.capability >= BLACKWELL and quantization.emulate is not True
    if quantization.recipe == "nvfp4" and instructed:
        reason = f"{device.name} runs it with Triton kernels, which we cannot trace without a GPU"
        remedy = "use quantization=mxfp8, or quantization.emulate=true, which computes other numbers, slowly"
        yield Violation("quantization.recipe", "nvfp4", reason, remedy)


def attention_kernel(experiment: Experiment) -> str:
    """Attention kernel of a plan for CUDA: `flash` (others save the same tensors), `efficient` or `math`."""
    backend = attention_backend(experiment.model)
    backend = _auto_backend(experiment) if backend == "auto" else backend
    return "flash" if backend in ("cudnn", "flex") else backend


def with_run_kernels(device: Device, experiment: Experiment) -> Device:
    """Device with the run's recipe, attention kernel and head size, which choose among its rates."""
    spec, kernel = model_spec(experiment.model), attention_backend(experiment.model)
    attention = None if spec is None else spec.attention
    if kernel == "auto":
        hopper, kernel = device.capability is not None and device.capability >= HOPPER, _auto_backend(experiment)
        kernel = "flash" if kernel == "cudnn" and not hopper else kernel
    head_dim = device.head_dim if attention is None else attention.qk_dim
    return replace(device, recipe=experiment.quantization.recipe, kernel=kernel, head_dim=head_dim)


def _auto_backend(experiment: Experiment) -> str:
    """Attention backend that `auto` chooses on CUDA; cuDNN on older GPUs, too."""
    spec, parallelism, training = model_spec(experiment.model), experiment.parallelism, experiment.training
    return auto_backend(
        [] if spec is None else [head_dim for _, head_dim in spec.head_dims],
        bf16=training.mixed_precision == "bf16",
        documents=experiment.data.document_mask,
        masked=spec is not None and (spec.has_sinks or spec.is_masked(training.seq_len)),
        parts=parallelism.cp > 1 and parallelism.cp_method != "ulysses",
        deterministic=training.deterministic,
    )
