"""Block-scaled weights: DeepSeek's FP8 and GPT-OSS's MXFP4."""

from collections.abc import Mapping

import torch
from torch import Tensor

from titan_exp.checkpoint.formats.safetensors import FP8, SafetensorsReader, window_extent
from titan_exp.config.errors.user_error import UserError

SCALE = "_scale_inv"
"""Suffix of a weight's scales. Despite the name, values are multiplied by them."""


class BlockFP8Reader:
    """Reads fp8 matrices in fp32, and tensors without scales as they are.

    Blocks are `blocks` rows and columns, the last ones possibly smaller. Raises UserError if weights and scales do not
    belong together.
    """

    def __init__(self, store: SafetensorsReader, blocks: tuple[int, int]) -> None:
        self._store, self._blocks = store, blocks
        found = store.shapes
        self._scaled = {name.removesuffix(SCALE) for name in found if name.endswith(SCALE)}
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: shape for name, shape in found.items() if not name.endswith(SCALE)
        }
        self._check_scales(found)

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor as read."""
        if name not in self._scaled:
            return self._store.dtype(name)
        return torch.float32

    def read(self, name: str, *window: slice) -> Tensor:
        """Read only a slice and the scales of its blocks from disk."""
        if name not in self._scaled:
            return self._store.read(name, *window)
        starts, sizes = window_extent(self.shapes[name], window)
        values = self._store.read(name, *window).float()
        if not values.numel():
            return values
        first = [start // block for start, block in zip(starts, self._blocks, strict=True)]
        spans = [
            slice(low, -(-(start + size) // block))
            for low, start, size, block in zip(first, starts, sizes, self._blocks, strict=True)
        ]
        scales = self._store.read(name + SCALE, *spans)
        for dim, (low, start, size, block) in enumerate(zip(first, starts, sizes, self._blocks, strict=True)):
            scales = scales.repeat_interleave(block, dim).narrow(dim, start - low * block, size)
        return values.mul_(scales)

    def _check_scales(self, found: Mapping[str, tuple[int, ...]]) -> None:
        """Raise UserError if a weight lacks scales, scales lack a weight, or a shape or dtype differs."""
        where = self._store.folder
        for name, shape in self.shapes.items():
            if name not in self._scaled and self._store.dtype(name, fp8=True) == FP8:
                raise UserError(f"{where}: {name} is in fp8, and its scales {name}{SCALE} are missing.")
            if name in self._scaled and self._store.dtype(name, fp8=True) != FP8:
                raise UserError(f"{where}: {name} has scales but is not in fp8 (e4m3).")
            wanted = tuple(-(-size // block) for size, block in zip(shape, self._blocks, strict=False))
            if name in self._scaled and (len(shape) != 2 or found[name + SCALE] != wanted):
                blocks = "×".join(map(str, self._blocks))
                raise UserError(
                    f"{where}: {name}{SCALE} is {list(found[name + SCALE])}, but {name} of {list(shape)} has "
                    f"{list(wanted)} blocks of {blocks}."
                )
            if name in self._scaled and self._store.dtype(name + SCALE) != torch.float32:
                raise UserError(f"{where}: {name}{SCALE} is {self._store.dtype(name + SCALE)}, not fp32.")
        lone = sorted(self._scaled - set(self.shapes))
        if lone:
            raise UserError(f"{where}: {lone[0]}{SCALE} has no weight {lone[0]}.")


BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of a weight's values [experts, out, in / 32, 16], two per byte, and exponents [experts, out, in / 32]."""
GROUP = 32
"""Number of inputs that share a scale."""
BIAS = 127
"""Stored exponent of a scale of 1."""
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes by the lower three bits; the fourth is the sign."""


class MXFP4Reader:
    """Reads quantized weights as [experts, in, out] in bf16, which holds them exactly, and other tensors as they are.

    Raises UserError if values and scales do not belong together.
    """

    def __init__(self, store: SafetensorsReader) -> None:
        self._store = store
        found = store.shapes
        self._quantized = {name.removesuffix(BLOCKS) for name in found if name.endswith(BLOCKS)}
        self._check(found)
        parts = {name + suffix for name in self._quantized for suffix in (BLOCKS, SCALES)}
        self.shapes: Mapping[str, tuple[int, ...]] = {
            **{name: shape for name, shape in found.items() if name not in parts},
            **{name: self._dequantized(found[name + BLOCKS]) for name in self._quantized},
        }
        signed = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=torch.bfloat16)
        byte = torch.arange(256)
        # Both values of each byte; the lower half comes first.
        self._pairs = torch.stack((signed[byte % 16], signed[byte // 16]), dim=1)

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor as read."""
        return torch.bfloat16 if name in self._quantized else self._store.dtype(name)

    def read(self, name: str, *window: slice) -> Tensor:
        """Read only a slice and the scales of its groups from disk."""
        if name not in self._quantized:
            return self._store.read(name, *window)
        (expert, first, row), (experts, inputs, rows) = window_extent(self.shapes[name], window)
        groups = slice(first // GROUP, -(-(first + inputs) // GROUP))
        part = (slice(expert, expert + experts), slice(row, row + rows), groups)
        exponents = self._store.read(name + SCALES, *part).int() - BIAS
        values = self._pairs[self._store.read(name + BLOCKS, *part).int()].flatten(-2)
        weights = torch.ldexp(values, exponents[..., None]).flatten(-2)
        return weights.narrow(-1, first - groups.start * GROUP, inputs).mT

    @staticmethod
    def _dequantized(blocks: tuple[int, ...]) -> tuple[int, ...]:
        experts, outputs, groups, _ = blocks
        return experts, groups * GROUP, outputs

    def _check(self, found: Mapping[str, tuple[int, ...]]) -> None:
        """Raise UserError if values lack scales, scales lack values, or a shape or dtype differs."""
        where = self._store.folder
        for name in sorted(self._quantized):
            blocks, scales = found[name + BLOCKS], found.get(name + SCALES)
            if scales is None:
                raise UserError(f"{where}: {name}{BLOCKS} has no {name}{SCALES}. Download the missing files.")
            if len(blocks) != 4 or blocks[3] * 2 != GROUP or scales != blocks[:3]:
                raise UserError(
                    f"{where}: {name}{BLOCKS} is {list(blocks)} and {name}{SCALES} {list(scales)}, and MXFP4 has "
                    f"[experts, out, in / {GROUP}, {GROUP // 2}] and [experts, out, in / {GROUP}]."
                )
            for suffix in (BLOCKS, SCALES):
                if self._store.dtype(name + suffix) != torch.uint8:
                    raise UserError(f"{where}: {name}{suffix} is {self._store.dtype(name + suffix)}, not uint8.")
        lone = sorted(name for name in found if name.endswith(SCALES) and name[: -len(SCALES)] not in self._quantized)
        if lone:
            raise UserError(f"{where}: {lone[0]} has no {lone[0].removesuffix(SCALES)}{BLOCKS}.")
