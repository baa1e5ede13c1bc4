"""Safetensors files, written and read by tensor, and block-scaled weights in them: DeepSeek's FP8, GPT-OSS's MXFP4."""

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from titan_exp.config.checkpoint_files import INDEX, parse_index
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.foreign_file import read_file


class TensorReader(Protocol):
    """Reader of one checkpoint format."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape by tensor name."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor."""
        ...

    def read(self, name: str, *window: slice) -> Tensor:
        """Read a window to the CPU, one slice of step 1 per dim, later dims whole; the result is read-only. Only the
        window is read from disk, or whole shards in sharded formats."""
        ...


def window_extent(shape: Sequence[int], window: Sequence[slice]) -> tuple[list[int], list[int]]:
    """First index and size of a window in each dim of a tensor."""
    sliced = [range(*part.indices(size)) for part, size in zip(window, shape, strict=False)]
    whole = shape[len(sliced) :]
    return [*(part.start for part in sliced), *[0] * len(whole)], [*map(len, sliced), *whole]


class RenamedReader:
    """Reads tensors whose stored names are in `names`, and unless `others` is False those of no other name."""

    def __init__(self, store: TensorReader, names: Mapping[str, str], *, others: bool = True) -> None:
        self._store, self._names = store, names
        found, stored = store.shapes, set(names.values())
        self.shapes: Mapping[str, tuple[int, ...]] = {
            **({name: shape for name, shape in found.items() if name not in stored} if others else {}),
            **{name: found[own] for name, own in names.items()},
        }

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor."""
        return self._store.dtype(self._names.get(name, name))

    def read(self, name: str, *window: slice) -> Tensor:
        """Read only a slice from disk."""
        return self._store.read(self._names.get(name, name), *window)


STEM = "model"  # first part of Hugging Face's file names
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
_DTYPES |= {"U8": torch.uint8, "BOOL": torch.bool}
FP8 = torch.float8_e4m3fn  # dtype of weights that are read only together with their scales
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class SafetensorsReader:
    """Reads `*.safetensors` of a folder, or one of them. Raises UserError if a file is missing or damaged."""

    def __init__(self, folder: Path, file: str | None = None) -> None:
        self.folder, self._file = folder, file
        self._open = cache(self._open_file)

    @cached_property
    def files(self) -> dict[str, str]:
        """File by tensor name."""
        index = self.folder / INDEX
        if self._file is not None or not index.is_file():
            found = sorted(self.folder.glob(self._file or "*.safetensors"))
            return {name: file.name for file in found for name in self._open(file.name).keys()}  # noqa: SIM118
        listed = parse_index(read_file(index), str(index))
        missing = sorted({file for file in listed.values() if not (self.folder / file).is_file()})
        if missing:
            raise UserError(f"{index} lists {', '.join(missing)}, which the folder lacks. Download the missing files.")
        return listed

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape by tensor name."""
        return self._shapes

    @cached_property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(self._slice(name).get_shape()) for name in self.files}

    def dtype(self, name: str, *, fp8: bool = False) -> torch.dtype:
        """Dtype of a tensor. Raises UserError if no weight has this dtype; `fp8` permits fp8 without scales."""
        kind = self._slice(name).get_dtype()
        if fp8 and kind == "F8_E4M3":
            return FP8
        if kind not in _DTYPES:
            raise UserError(f"{self.folder / self.files[name]}: {name} is {kind}, and we read {', '.join(_DTYPES)}.")
        return _DTYPES[kind]

    def read(self, name: str, *window: slice) -> Tensor:
        """Read only a slice from disk."""
        part = self._slice(name)
        if not part.get_shape():
            return self._open(self.files[name]).get_tensor(name)
        return part[window or (slice(None),)]

    def _slice(self, name: str) -> Any:
        try:
            return self._open(self.files[name]).get_slice(name)
        except SafetensorError as error:
            raise UserError(f"{self.folder / self.files[name]}: cannot read {name} ({error}).") from error

    def _open_file(self, file: str) -> Any:
        try:
            return safe_open(self.folder / file, framework="pt")
        except (SafetensorError, OSError) as error:
            why = "It is damaged, or its download was not complete."
            raise UserError(f"Cannot read {self.folder / file} ({error}). {why}") from error


PIECE_BYTES = 2**28  # bytes of a larger tensor that are written at once, at least one row or expert


@dataclass(frozen=True)
class TensorSpec:
    """Name, full shape and dtype of a tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def windows(self) -> Iterator[tuple[slice, ...]]:
        """Windows that are written one after the other: the whole tensor, or some rows or experts each."""
        if len(self.shape) < 2 or self.bytes <= PIECE_BYTES:
            yield ()
            return
        count = max(1, PIECE_BYTES * self.shape[0] // self.bytes)
        for first in range(0, self.shape[0], count):
            yield (slice(first, first + count),)


TensorProducer = Callable[..., Tensor]
"""Produces the tensor of a spec, or a window of it: one slice per dim, later dims whole. It is called in order."""


def write_safetensors(
    folder: Path, specs: Sequence[TensorSpec], produce: TensorProducer, *, file_bytes: float, stem: str = STEM
) -> None:
    """Write `model.safetensors`, or numbered files of at most `file_bytes` (or one tensor) each and their index. `stem`
    replaces `model` in their names. One tensor, or some of its rows or experts, is in memory at a time; the library's
    writer would hold a whole file."""
    parts = _files(specs, file_bytes, stem)
    for name, part in parts.items():
        _write_file(folder / name, part, produce)
    _write_index(folder, parts, stem)


@dataclass(frozen=True)
class TensorLocation:
    """File name of a tensor, and the offset of its first byte."""

    file: str
    begin: int
    spec: TensorSpec


def tensor_locations(specs: Sequence[TensorSpec], *, file_bytes: float) -> dict[str, TensorLocation]:
    """Tensor locations in the files that `write_safetensors` would write, by name."""
    return {
        spec.name: TensorLocation(file, len(header) + begin, spec)
        for file, part in _files(specs, file_bytes).items()
        for header, begins in [_header(part)]
        for spec, begin in zip(part, begins, strict=True)
    }


def preallocate_safetensors(folder: Path, specs: Sequence[TensorSpec], *, file_bytes: float) -> None:
    """Write headers and index, and preallocate the data for other ranks. Raises OSError if the disk has no room."""
    parts = _files(specs, file_bytes)
    for name, part in parts.items():
        header, _ = _header(part)
        size = len(header) + sum(spec.bytes for spec in part)
        with (folder / name).open("wb") as file:
            file.write(header)
            file.flush()
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:  # macOS: the disk may fill up later
                file.truncate(size)
    _write_index(folder, parts)


def _files(specs: Sequence[TensorSpec], file_bytes: float, stem: str = STEM) -> dict[str, list[TensorSpec]]:
    parts, room = list[list[TensorSpec]](), 0.0
    for spec in specs:
        if not parts or spec.bytes > room:
            parts.append([])
            room = file_bytes
        parts[-1].append(spec)
        room -= spec.bytes
    if len(parts) == 1:
        return {f"{stem}.safetensors": parts[0]}
    return {f"{stem}-{number:05d}-of-{len(parts):05d}.safetensors": part for number, part in enumerate(parts, start=1)}


def _write_index(folder: Path, parts: Mapping[str, Sequence[TensorSpec]], stem: str = STEM) -> None:
    if len(parts) == 1:
        return
    listed = {spec.name: name for name, part in parts.items() for spec in part}
    total = sum(spec.bytes for part in parts.values() for spec in part)
    index = {"metadata": {"total_size": total}, "weight_map": listed}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _header(specs: Sequence[TensorSpec]) -> tuple[bytes, list[int]]:
    """Header of a file, and the offset of each tensor after it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins, end = [], 0
    for spec in specs:
        begin, end = end, end + spec.bytes
        begins.append(begin)
        header[spec.name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensor data to 8 bytes
    return struct.pack("<Q", len(text)) + text, begins


def _write_file(path: Path, specs: Sequence[TensorSpec], produce: TensorProducer) -> None:
    with path.open("wb") as file:
        file.write(_header(specs)[0])
        for spec in specs:
            for window in spec.windows():
                tensor = produce(spec, *window).contiguous()
                whole = (len(tensor), *spec.shape[1:]) if window else spec.shape
                assert (tuple(tensor.shape), tensor.dtype) == (whole, spec.dtype), spec.name
                file.write(tensor.flatten().view(torch.uint8).numpy().data)
                del tensor
        file.flush()
        os.fsync(file.fileno())


SCALE = "_scale_inv"  # suffix of a weight's scales. Despite the name, values are multiplied by them.


class BlockFP8Reader:
    """Reads fp8 matrices in fp32, and tensors without scales as they are. Blocks are `blocks` rows and columns, the
    last ones possibly smaller. Raises UserError if weights and scales do not belong together."""

    def __init__(self, store: SafetensorsReader, blocks: tuple[int, int]) -> None:
        self._store, self._blocks = store, blocks
        found = store.shapes
        self._scaled = {name.removesuffix(SCALE) for name in found if name.endswith(SCALE)}
        weights = [name for name in found if not name.endswith(SCALE)]
        self.shapes: Mapping[str, tuple[int, ...]] = {name: found[name] for name in weights}
        self._check_scales(found)

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor as read."""
        return torch.float32 if name in self._scaled else self._store.dtype(name)

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
GROUP = 32  # number of inputs that share a scale
BIAS = 127  # stored exponent of a scale of 1
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes by the lower three bits; the fourth is the sign


class MXFP4Reader:
    """Reads quantized weights as [experts, in, out] in bf16, which holds them exactly, and other tensors as they are.
    Raises UserError if values and scales do not belong together."""

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
