"""Storage formats of AdamW's moments: fp32, bf16, or 8-bit blocks with a scale each.

Blocks lie within rows, so they are whole on one rank and a checkpoint fits every layout; torchao's optimizers block the
local shard.
"""

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from titan_exp.config.groups.optimizer import MOMENT_BLOCK
from titan_exp.config.machine.torchao_version import import_torchao


class MomentFormat(Protocol):
    """Storage of one moment of a parameter, as one or two tensors."""

    def empty(self, like: Tensor) -> list[Tensor]:
        """Tensors of a zero moment, for this rank's shard of a parameter."""
        ...

    def read(self, kept: list[Tensor]) -> Tensor:
        """The moment in fp32, not to be modified."""
        ...

    def write(self, kept: list[Tensor], moment: Tensor) -> None:
        """Store a moment."""
        ...


class Rounded:
    """Rounded to a torch dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def empty(self, like: Tensor) -> list[Tensor]:
        """One tensor of the dtype."""
        return [torch.zeros_like(like, dtype=self.dtype)]

    def read(self, kept: list[Tensor]) -> Tensor:
        """Stored form of a moment."""
        return kept[0].float()

    def write(self, kept: list[Tensor], moment: Tensor) -> None:
        """Round to nearest."""
        kept[0].copy_(moment)


class Float8Blocks:
    """e4m3 numbers as bytes, and an fp32 scale per block.

    `root` stores square roots of a non-negative moment: a second moment spans twice the exponents of its gradients, and
    one that underflows to 0 makes the update far too large.
    """

    def __init__(self, *, root: bool = False) -> None:
        self.root = root

    def empty(self, like: Tensor) -> list[Tensor]:
        """Bytes, and scales [..., columns / MOMENT_BLOCK]."""
        scales = torch.zeros(*like.shape[:-1], like.shape[-1] // MOMENT_BLOCK, device=like.device)
        return [torch.zeros_like(like, dtype=torch.uint8), scales]

    def read(self, kept: list[Tensor]) -> Tensor:
        """Number times scale."""
        numbers = kept[0].view(torch.float8_e4m3fn).float().unflatten(-1, (-1, MOMENT_BLOCK))
        found = (numbers * kept[1][..., None]).flatten(-2)
        return found.square_() if self.root else found

    def write(self, kept: list[Tensor], moment: Tensor) -> None:
        """Scale each block's largest value to e4m3's."""
        from torchao.optim.subclass_fp8 import quantize_fp8

        moment = moment.sqrt() if self.root else moment
        numbers, scales = quantize_fp8(moment.contiguous(), MOMENT_BLOCK)
        kept[0].copy_(numbers.view(torch.uint8))
        kept[1].copy_(scales.view_as(kept[1]))


class DynamicBlocks:
    """Codes of 256 values, denser around zero (Dettmers et al. 2022), and an fp32 scale per block."""

    def __init__(self, *, signed: bool) -> None:
        self.signed = signed

    def empty(self, like: Tensor) -> list[Tensor]:
        """Codes, and scales [..., columns / MOMENT_BLOCK]."""
        return Float8Blocks().empty(like)

    def read(self, kept: list[Tensor]) -> Tensor:
        """Value times scale."""
        from torchao.optim.quant_utils import dequant_with_qmap

        return dequant_with_qmap(kept[0], _values(self.signed, kept[0].device), kept[1].flatten())

    def write(self, kept: list[Tensor], moment: Tensor) -> None:
        """Nearest value of each number, relative to its block's largest."""
        from torchao.optim.quant_utils import quantize_8bit_with_qmap, scale_tensor

        scaled, scales = scale_tensor(moment.contiguous(), MOMENT_BLOCK)
        kept[0].copy_(quantize_8bit_with_qmap(scaled, _values(self.signed, moment.device)))
        kept[1].copy_(scales.view_as(kept[1]))


def formats_of(precision: str) -> tuple[MomentFormat, MomentFormat]:
    """Formats of the first and second moment, by `optimizer.state_precision`."""
    if precision in ("fp32", "bf16"):
        rounded = Rounded(torch.float32 if precision == "fp32" else torch.bfloat16)
        return rounded, rounded
    with import_torchao():
        import torchao.optim  # noqa: F401  # its functions are imported where used
    if precision == "fp8":
        return Float8Blocks(), Float8Blocks(root=True)
    return DynamicBlocks(signed=True), DynamicBlocks(signed=False)


@cache
def _values(signed: bool, device: torch.device) -> Tensor:
    from torchao.optim.quant_utils import create_dynamic_map

    return torch.tensor(create_dynamic_map(signed=signed), device=device)
