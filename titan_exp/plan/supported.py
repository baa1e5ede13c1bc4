"""Which options of a run the planner knows the memory of; asked before torch is imported, to refuse at once."""

from collections.abc import Iterator

from titan_exp.config.errors.did_you_mean import listed
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.machine.attention_backends import HEAD_SIZES
from titan_exp.config.machine.devices import device_type
from titan_exp.models.spec.lookup import attention_backend, model_spec
from titan_exp.plan.cuda.devices import Device

BACKENDS = ("inductor", "aot_eager", "eager")
"""Backends of torch.compile whose code runs on tensors without data."""

BLACKWELL = (10, 0)
"""CUDA's compute capability from which on there are instructions for NVFP4."""

WHY_NOT = {
    "fa3": "what it takes is known to its own package alone",
    "fa4": "what it takes is known to its own package alone",
    "flex": "FlexAttention's kernels have no backward pass on a CPU, where everything is traced",
}
"""Of attention kernels that are not modelled, why."""


def check_supported(experiment: Experiment) -> None:
    """Every option of a run is one whose memory is known.

    Raises:
        UserError: one is not.
    """
    cuda, found = device_type(experiment.cluster) == "cuda", list[Violation]()
    if experiment.compile.enabled and experiment.compile.backend not in BACKENDS:
        reason, backend = "what this backend keeps is not known", experiment.compile.backend
        found.append(Violation("compile.backend", backend, reason, f"one of {listed(BACKENDS)}, or compile=none"))
    if cuda:
        found += _on_cuda(experiment)
    if found:
        raise UserError("This run cannot be planned.", found)


def _on_cuda(experiment: Experiment) -> Iterator[Violation]:
    if experiment.parallelism.async_tp:
        reason = "symmetric memory lies outside torch's allocator, and its operators are only there with a GPU"
        yield Violation("parallelism.async_tp", True, reason, "parallelism.async_tp=false")
    if experiment.compile.cuda_graphs:
        reason = (
            "a graph keeps the memory of a pass for itself beside what is evaluated and updated, which is not modelled"
        )
        yield Violation("compile.cuda_graphs", True, reason, "compile.cuda_graphs=false plans the same run without")
    backend = attention_backend(experiment.model)
    if backend in WHY_NOT:
        yield Violation("model.attention_backend", backend, WHY_NOT[backend], "model.attention_backend=auto, or math")
    if backend == "cudnn" and experiment.data.document_mask:
        reason = "what cuDNN takes with a mask is not known, and data.document_mask is true"
        yield Violation("model.attention_backend", backend, reason, "model.attention_backend=auto")


def check_supported_on(experiment: Experiment, device: Device) -> None:
    """What the run does on this GPU is known, too.

    Raises:
        UserError: it is not.
    """
    found = list[Violation]()
    if device.capability is None and attention_kernel(experiment) == "efficient":
        reason = f"in fp32 or with a document mask it is the efficient kernel, which {device.name} has another of"
        backend = attention_backend(experiment.model)
        found.append(Violation("model.attention_backend", backend, reason, "model.attention_backend=math"))
    quantization = experiment.quantization
    instructed = device.capability is not None and device.capability >= BLACKWELL and quantization.emulate is not True
    if quantization.recipe == "nvfp4" and instructed:
        reason = f"{device.name} has instructions for it, and its kernels are Triton's, which only run with a GPU"
        remedy = "quantization=mxfp8; or quantization.emulate=true, which is another run, and a slow one"
        found.append(Violation("quantization.recipe", "nvfp4", reason, remedy))
    if found:
        raise UserError("This run cannot be planned.", found)


def attention_kernel(experiment: Experiment) -> str:
    """The kernel that a plan for CUDA counts with: `flash` for cuDNN too, which keeps the same; `efficient`; `math`.

    What `auto` is on CUDA is as `ops.attention.choose_backend` has it.
    """
    spec, backend = model_spec(experiment.model), attention_backend(experiment.model)
    if backend != "auto":
        return "flash" if backend == "cudnn" else backend
    fp32 = experiment.training.mixed_precision == "fp32"
    attention = None if spec is None else spec.attention
    takes = attention is None or HEAD_SIZES["flash"].takes(attention.qk_dim)
    return "efficient" if fp32 or experiment.data.document_mask or not takes else "flash"
