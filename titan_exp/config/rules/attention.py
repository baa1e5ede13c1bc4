"""Rules about the attention kernel: what the device has, and what the kernel takes (as of torch 2.13)."""

from collections.abc import Iterator

from titan_exp.config.builtins import ARCHITECTURES
from titan_exp.config.errors import Violation
from titan_exp.config.experiment import Experiment
from titan_exp.config.layout import device_type

ON_CPU = ("auto", "flash", "math")
"""Kernels that a CPU can train with; FlexAttention has no backward there."""


def kernel_exists(experiment: Experiment) -> Iterator[Violation]:
    """The device has the kernel."""
    backend = experiment.model.attention_backend
    if device_type(experiment.cluster) == "cpu" and backend not in ON_CPU:
        reason = "FlexAttention has no backward on CPU" if backend == "flex" else "a CPU has no such kernel"
        yield Violation("model.attention_backend", backend, reason, "on CPU: auto, flash or math")


def kernel_takes_it(experiment: Experiment) -> Iterator[Violation]:
    """On CUDA, the kernel takes this precision and this mask."""
    backend = experiment.model.attention_backend
    if device_type(experiment.cluster) == "cpu" or experiment.model.architecture not in ARCHITECTURES:
        return
    if backend in ("flash", "cudnn") and experiment.training.mixed_precision == "fp32":
        yield Violation(
            "model.attention_backend",
            backend,
            "it computes in bf16 only, and training.mixed_precision is fp32",
            "training.mixed_precision=bf16, or model.attention_backend=auto",
        )
    if backend == "flash" and experiment.data.document_mask:
        yield Violation(
            "model.attention_backend",
            backend,
            "on CUDA it takes no mask, and data.document_mask is true",
            "model.attention_backend=auto, cudnn or flex; or data.document_mask=false",
        )


RULES = (kernel_exists, kernel_takes_it)
