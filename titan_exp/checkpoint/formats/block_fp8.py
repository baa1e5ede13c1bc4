"""Block-scaled fp8 weights (DeepSeek V3), dequantized slice by slice: e4m3 values times an fp32 scale per block."""

from collections.abc import Mapping

import torch
from torch import Tensor

from titan_exp.checkpoint.formats.safetensors import FP8, SafetensorsReader
from titan_exp.checkpoint.formats.tensor_reader import window_extent
from titan_exp.config.errors.user_error import UserError

SCALE = "_scale_inv"
"""Suffix of a weight's scales: values are multiplied by them, whatever their name says."""


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
        """Raise a UserError for a weight without scales, scales without a weight, or of another shape or dtype."""
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
