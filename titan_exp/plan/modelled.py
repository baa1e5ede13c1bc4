"""Which options of a run the planner knows the memory of; asked before torch is imported, to refuse at once."""

from collections.abc import Iterator

from titan_exp.config.errors import UserError, Violation
from titan_exp.config.experiment import Experiment
from titan_exp.config.layout import device_type
from titan_exp.config.suggest import listed

BACKENDS = ("inductor", "aot_eager", "eager")
"""Backends of torch.compile whose code runs on tensors without data."""


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
    kernel = "the efficient kernel, whose backward pass takes memory by the GPU's number of processors"
    if experiment.model.attention_backend not in ("auto", "flash", "cudnn"):
        backend = experiment.model.attention_backend
        reason = f"what it takes on CUDA is not known{f': it is {kernel}' if backend == 'efficient' else ''}"
        yield Violation("model.attention_backend", backend, reason, "model.attention_backend=flash")
    if experiment.data.document_mask:
        reason = f"attention with a document mask is {kernel}"
        yield Violation("data.document_mask", True, reason, "data.document_mask=false plans the same run without")
    if experiment.training.mixed_precision != "bf16":
        reason = f"attention in fp32 is {kernel}"
        yield Violation("training.mixed_precision", "fp32", reason, "training.mixed_precision=bf16")
