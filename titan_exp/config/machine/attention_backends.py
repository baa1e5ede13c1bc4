"""Attention kernels on GPUs: head sizes and packages, without asking a device."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

ON_CPU = ("auto", "flash", "math")
"""Kernels that a CPU can train with; FlexAttention has no backward there."""


@dataclass(frozen=True)
class HeadSizes:
    """Head widths that a kernel trains with."""

    largest: int
    """Largest width."""
    multiple: int = 1
    """Divisor of every width."""

    def takes(self, head_dim: int) -> bool:
        """True if the kernel trains with heads of this width."""
        return head_dim <= self.largest and head_dim % self.multiple == 0


HEAD_SIZES = {
    "cudnn": HeadSizes(256, 8),
    "flash": HeadSizes(256),
    "fa3": HeadSizes(256, 8),
    "fa4": HeadSizes(128, 8),
}
"""By `model.attention_backend`; others take any. cuDNN takes over 128 on Hopper only, where `auto` prefers flash."""

CUDNN_EVERYWHERE = HeadSizes(128, 8)
"""Head sizes of cuDNN on every GPU that has it."""


@dataclass(frozen=True)
class FlashPackage:
    """FlashAttention package newer than torch's own, which it replaces."""

    title: str
    """Name in messages."""
    implementation: str
    """Name in `torch.nn.attention.activate_flash_attention_impl`."""
    module: str
    """Import path of the module."""
    majors: tuple[int, ...]
    """Major CUDA compute capabilities that torch calls it on: 9 is Hopper, 10 Blackwell."""
    install: str
    """Command or hint to install it."""

    def is_installed(self) -> bool:
        """True if the package can be imported; importing it would import torch."""
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
"""By `model.attention_backend`."""
