"""Attention kernels on GPUs: supported head sizes and packages, without querying a device."""

import importlib.util
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

ATTENTION_BACKEND = "model.attention_backend"
"""Key of the kernel of every family with attention."""

ON_CPU = ("auto", "flash", "math")
"""Kernels with training support on CPUs; FlexAttention has no CPU backward."""

MERGING = ("auto", "flash", "efficient")
"""Kernels that return the log-sum-exp needed for merging by ring and all-gather, if the device supports them."""


@dataclass(frozen=True)
class HeadSizes:
    """Head sizes supported by a kernel in training."""

    largest: int
    """Maximum head size."""
    multiple: int = 1
    """Required divisor of head sizes."""

    def takes(self, head_dim: int) -> bool:
        """True if the kernel supports training with this head size."""
        return head_dim <= self.largest and head_dim % self.multiple == 0


HEAD_SIZES = {
    "cudnn": HeadSizes(256, 8),
    "flash": HeadSizes(256),
    "fa3": HeadSizes(256, 8),
    "fa4": HeadSizes(128, 8),
}
"""Head sizes by `attention_backend`, of kernels for bf16 only; others support any, but for `efficient_multiple`. cuDNN
supports over 128 only on Hopper, where `auto` prefers flash."""

FLASH_WITH_LSE = HeadSizes(256, 8)
"""Head sizes of flash for the log-sum-exp, which is read without SDPA; that pads others to such multiples."""

EFFICIENT_BYTES = 16
"""Required divisor of the bytes of a head in the efficient kernel."""


def efficient_multiple(*, bf16: bool) -> int:
    """Required divisor of head sizes in the efficient kernel."""
    return EFFICIENT_BYTES // (2 if bf16 else 4)


CUDNN_EVERYWHERE = HeadSizes(128, 8)
"""Head sizes of cuDNN on all GPUs with cuDNN."""


def auto_backend(
    head_dims: Collection[int], *, bf16: bool, documents: bool, masked: bool, parts: bool, deterministic: bool
) -> str:
    """Kernel that `auto` is on CUDA: `flex`, `efficient`, `math`, `flash`, or `cudnn`, which older GPUs replace by
    `flash`.

    `masked` says that a layer has sinks, or a window or chunks shorter than the sequence; `parts` that attention is
    merged by LSE, which excludes cuDNN and FlexAttention; torch refuses cuDNN's backward pass for `deterministic` runs.
    All layers take the same kernel, which supports each of their `head_dims`.
    """
    if masked:
        return "efficient" if parts else "flex"
    if documents or not bf16 or not all(map(HEAD_SIZES["flash"].takes, head_dims)):
        multiple = efficient_multiple(bf16=bf16)
        return "math" if any(head_dim % multiple for head_dim in head_dims) else "efficient"
    everywhere = all(map(CUDNN_EVERYWHERE.takes, head_dims))
    return "cudnn" if everywhere and not parts and not deterministic else "flash"


@dataclass(frozen=True)
class FlashPackage:
    """FlashAttention package that replaces torch's older implementation."""

    title: str
    """Name in messages."""
    implementation: str
    """Name in `torch.nn.attention.activate_flash_attention_impl`."""
    module: str
    """Import path of the module."""
    majors: tuple[int, ...]
    """Major CUDA compute capabilities supported by torch's integration: 9 is Hopper, 10 Blackwell."""
    install: str
    """Command or hint to install it."""

    def is_installed(self) -> bool:
        """True if the package is installed; does not import it, since that imports torch."""
        package, _, inner = self.module.partition(".")
        found = importlib.util.find_spec(package)
        if found is None or not inner:
            return found is not None
        return any((Path(place) / inner).is_dir() for place in found.submodule_search_locations or ())


FLASH_PACKAGES = {
    "fa3": FlashPackage(
        "FlashAttention 3",
        "FA3",
        "flash_attn_interface",
        (9,),
        "it is built from the folder hopper of github.com/Dao-AILab/flash-attention",
    ),
    "fa4": FlashPackage("FlashAttention 4", "FA4", "flash_attn.cute", (9, 10), "pip install flash-attn-4"),
}
"""FlashAttention packages by `attention_backend`."""
