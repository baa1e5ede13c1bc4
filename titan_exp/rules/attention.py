"""Rules about the attention kernel: what the device has, what is installed, and what the kernel takes (as of torch
2.13)."""

from collections.abc import Iterator

from titan_exp.config.errors.did_you_mean import listed
from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.builtins import ARCHITECTURES
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.machine.attention_backends import FLASH_PACKAGES, HEAD_SIZES, ON_CPU
from titan_exp.config.machine.devices import device_type
from titan_exp.rules.rule import rules


def kernel_exists(experiment: Experiment) -> Iterator[Violation]:
    """The device has the kernel."""
    backend = experiment.model.attention_backend
    if device_type(experiment.cluster) == "cpu" and backend not in ON_CPU:
        reason = "FlexAttention has no backward on CPU" if backend == "flex" else "it runs on GPUs, and this is a CPU"
        yield Violation("model.attention_backend", backend, reason, "on CPU: auto, flash or math")


def kernel_takes_it(experiment: Experiment) -> Iterator[Violation]:
    """On CUDA, the kernel takes this precision and this mask."""
    backend = experiment.model.attention_backend
    if device_type(experiment.cluster) == "cpu" or experiment.model.architecture not in ARCHITECTURES:
        return
    if backend in HEAD_SIZES and experiment.training.mixed_precision == "fp32":
        yield Violation(
            "model.attention_backend",
            backend,
            "it computes in bf16 only, and training.mixed_precision is fp32",
            "training.mixed_precision=bf16, or model.attention_backend=auto",
        )
    if backend in ("flash", *FLASH_PACKAGES) and experiment.data.document_mask:
        yield Violation(
            "model.attention_backend",
            backend,
            "on CUDA it takes no mask, and data.document_mask is true",
            "model.attention_backend=auto, cudnn or flex; or data.document_mask=false",
        )


def kernel_is_installed(experiment: Experiment) -> Iterator[Violation]:
    """FlashAttention 3 and 4 are packages of their own."""
    backend = experiment.model.attention_backend
    package = FLASH_PACKAGES.get(backend)
    if package is not None and device_type(experiment.cluster) == "cuda" and not package.is_installed():
        reason = f"{package.title} is not installed: there is no module {package.module}"
        yield Violation("model.attention_backend", backend, reason, f"{package.install}; or auto, cudnn or flash")


def heads_are_of_a_size(experiment: Experiment) -> Iterator[Violation]:
    """On CUDA, the kernel takes heads this wide."""
    backend, head_dim = experiment.model.attention_backend, experiment.model.head_dim
    sizes = HEAD_SIZES.get(backend)
    if device_type(experiment.cluster) == "cpu" or sizes is None or sizes.takes(head_dim):
        return
    every = f"multiples of {sizes.multiple} " if sizes.multiple > 1 else "heads "
    works = [name for name in ("fa3", "flash") if name != backend and HEAD_SIZES[name].takes(head_dim)]
    yield Violation(
        "model.attention_backend",
        backend,
        f"on CUDA it takes {every}up to {sizes.largest}, and model.head_dim is {head_dim}",
        f"model.attention_backend={listed(['auto', *works, 'efficient', 'flex'])}",
    )


RULES = rules(kernel_exists, kernel_is_installed, kernel_takes_it, heads_are_of_a_size)
