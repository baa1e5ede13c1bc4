"""Features of the installed torch and torchao: attention backends, operators, versions."""

import importlib.metadata
import logging
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.parallelism import MIN_TORCHAO

COLLECTIVES = ("all_gather_into_tensor", "all_reduce", "all_to_all_single", "reduce_scatter_tensor", "wait_tensor")
"""Operators of the namespace `_c10d_functional`."""


class Kept(NamedTuple):
    """Entry of `activation_checkpoint.save`: `aten.mm/2` saves every second call, the first included."""

    operator: str
    """`namespace.name` or `namespace.name.overload`."""
    every: int
    """Interval of saved calls in a block."""


def read_entry(entry: str) -> Kept | None:
    """Parse an entry `namespace.name[.overload][/number]`; None if it has another form."""
    found = re.fullmatch(r"(\w+\.\w+(?:\.\w+)?)(?:/([1-9]\d*))?", entry)
    return Kept(found[1], int(found[2] or 1)) if found else None


def known_operators(namespace: str) -> tuple[str, ...]:
    """Operator names of a namespace, unqualified; empty if unknown without torch."""
    if namespace == "_c10d_functional":
        return COLLECTIVES
    return _aten_operators() if namespace == "aten" else ()


@cache
def _aten_operators() -> tuple[str, ...]:
    if (spec := find_spec("torchgen")) is None or spec.origin is None:
        return ()
    path = Path(spec.origin).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    text = path.read_text() if path.is_file() else ""
    return tuple(dict.fromkeys(re.findall(r"^- func: (\w+)", text, flags=re.MULTILINE)))


ATTENTION_BACKEND = "model.attention_backend"
"""Key of the kernel of every family with attention."""
LINEAR_ATTENTION_BACKEND = "model.linear_attention_backend"
"""Key of the kernel of every family with linear attention."""
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


HEAD_SIZES = {"cudnn": HeadSizes(256, 8), "flash": HeadSizes(256), "fa3": HeadSizes(256, 8), "fa4": HeadSizes(128, 8)}
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
    `flash`. `masked` says that a layer has sinks, or a window or chunks shorter than the sequence; `parts` that
    attention is merged by LSE, which excludes cuDNN and FlexAttention; torch refuses cuDNN's backward pass for
    `deterministic` runs. All layers take the same kernel, which supports each of their `head_dims`."""
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
        found = find_spec(package)
        if found is None or not inner:
            return found is not None
        return any((Path(place) / inner).is_dir() for place in found.submodule_search_locations or ())


FLASH_PACKAGES = {
    "fa3": FlashPackage(
        *("FlashAttention 3", "FA3", "flash_attn_interface", (9,)),
        "build it from the folder hopper of github.com/Dao-AILab/flash-attention",
    ),
    "fa4": FlashPackage("FlashAttention 4", "FA4", "flash_attn.cute", (9, 10), "type pip install flash-attn-4"),
}
"""FlashAttention packages by `attention_backend`."""


def has_fla() -> bool:
    """True if fla-core and Triton, without which it cannot be imported, are installed; imports neither."""
    return find_spec("fla") is not None and find_spec("triton") is not None


def torchao_version() -> str | None:
    """Version of the installed torchao; None without one."""
    try:
        return importlib.metadata.version("torchao")
    except importlib.metadata.PackageNotFoundError:
        return None


def torchao_violations(recipe: str) -> list[Violation]:
    """Violation by a torchao without the recipe's kernels."""
    installed, least = torchao_version(), MIN_TORCHAO.get(recipe)
    if least is None or installed is None or tuple(map(int, re.findall(r"\d+", installed)[:2])) >= least:
        return []
    version = ".".join(map(str, least))
    reason = f"its kernels need torchao {version} or newer, and you have torchao {installed}"
    remedy = f"type pip install 'torchao>={version}', or use quantization.emulate=true, which is slow"
    return [Violation("quantization.recipe", recipe, reason, remedy)]


@contextmanager
def import_torchao() -> Iterator[None]:
    """Silence warnings of torchao about kernels for other hardware in the `with` block, which imports it."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
