"""Which options of a run the planner knows the memory of; asked before torch is imported, to refuse at once."""

from collections.abc import Iterator

from titan_exp.config.attention import HEAD_SIZES
from titan_exp.config.errors import UserError, Violation
from titan_exp.config.experiment import Experiment
from titan_exp.config.layout import device_type
from titan_exp.config.suggest import listed

BACKENDS = ("inductor", "aot_eager", "eager")
"""Backends of torch.compile whose code runs on tensors without data."""

WHY_NOT = {
    "fa3": "what it takes is known to its own package alone",
    "fa4": "what it takes is known to its own package alone",
    "flex": "FlexAttention's kernels have no backward pass on a CPU, where everything is traced",
}
"""Of attention kernels that are not modelled, why."""


def require_modelled(experiment: Experiment) -> None:
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
    if experiment.quantization.recipe == "mxfp8":
        reason = "where there are instructions for it, its casts are Triton kernels, which are not there without a GPU"
        yield Violation("quantization.recipe", "mxfp8", reason, "quantization=none, or a float8 recipe")
    if experiment.parallelism.async_tp:
        reason = "symmetric memory lies outside torch's allocator, and its operators are only there with a GPU"
        yield Violation("parallelism.async_tp", True, reason, "parallelism.async_tp=false")
    backend = experiment.model.attention_backend
    if backend in WHY_NOT:
        yield Violation("model.attention_backend", backend, WHY_NOT[backend], "model.attention_backend=auto, or math")
    if backend == "cudnn" and experiment.data.document_mask:
        reason = "what cuDNN takes with a mask is not known, and data.document_mask is true"
        yield Violation("model.attention_backend", backend, reason, "model.attention_backend=auto")


def attention_kernel(experiment: Experiment) -> str:
    """The kernel that a plan for CUDA counts with: `flash` for cuDNN too, which keeps the same; `efficient`; `math`.

    What `auto` is on CUDA is as `ops.attention.choose_backend` has it.
    """
    backend, model = experiment.model.attention_backend, experiment.model
    if backend != "auto":
        return "flash" if backend == "cudnn" else backend
    fp32 = experiment.training.mixed_precision == "fp32"
    takes = HEAD_SIZES["flash"].takes(model.head_dim)
    return "efficient" if fp32 or experiment.data.document_mask or not takes else "flash"
