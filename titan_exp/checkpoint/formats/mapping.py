"""Mapping readers between titan_exp parameters and another format's tensors, one slice at a time."""

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from titan_exp.checkpoint.formats.tensor_reader import FULL_SLICE, TensorReader
from titan_exp.config.errors.user_error import UserError
from titan_exp.models.convert.state_dict_map import RowRange, StateDictMap


class ImportReader:
    """Reads titan_exp parameters, by full name, from a checkpoint in another format."""

    def __init__(self, store: TensorReader, row_map: StateDictMap) -> None:
        self._store, self._map = store, row_map
        self.shapes = row_map.shapes

    def dtype(self, name: str) -> torch.dtype:
        """Promoted dtype of a parameter's source tensors."""
        found = None
        for their_name in dict.fromkeys(run.name for run in self._map.runs[name]):
            kind = self._store.dtype(their_name)
            found = kind if found is None else torch.promote_types(found, kind)
        assert found is not None, "a parameter has rows"
        return found

    def read(self, name: str, rows: slice = FULL_SLICE, columns: slice = FULL_SLICE) -> Tensor:
        """Read a slice of a parameter, and only the needed source rows."""
        shape = self.shapes[name]
        start, stop, _ = rows.indices(shape[0])
        width = [len(range(*columns.indices(shape[1])))] if len(shape) > 1 else []
        gathered = torch.empty([max(0, stop - start), *width], dtype=self.dtype(name))
        by_name: defaultdict[str, list[RowRange]] = defaultdict(list)
        for run in self._map.of(name, start, stop):
            by_name[run.name].append(run)
        for their_name, runs in by_name.items():
            low, high = min(run.first for run in runs), max(run.theirs.stop for run in runs)
            block = self._store.read(their_name, slice(low, high), columns)
            for run in runs:
                theirs = slice(run.theirs.start - low, run.theirs.stop - low, run.step)
                gathered[run.start - start : run.start - start + run.rows] = block[theirs]
        return gathered


class ExportReader:
    """Reads whole tensors of another format from a checkpoint of titan_exp parameters."""

    def __init__(self, store: TensorReader, row_map: StateDictMap) -> None:
        self._store, self._map = store, row_map
        # Query, key and value are read in sequence as rows of one fused parameter.
        self._held: tuple[str, Tensor] | None = None

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor."""
        return self._store.dtype(self._owner(name)[0])

    def read(self, name: str) -> Tensor:
        """Read a tensor."""
        ours, runs = self._owner(name)
        whole, shape = self._read_once(ours), self._map.their_shapes[name]
        if len(runs) == 1 and runs[0].rows == whole.shape[0]:
            return whole
        tensor = torch.empty(shape, dtype=whole.dtype)
        for run in runs:
            tensor[run.theirs] = whole[run.ours]
        return tensor

    def _read_once(self, ours: str) -> Tensor:
        if self._held is None or self._held[0] != ours:
            self._held = None  # free before reading the next one
            self._held = (ours, self._store.read(ours))
        return self._held[1]

    def _owner(self, name: str) -> tuple[str, tuple[RowRange, ...]]:
        return self._map.owners[self._map.copies.get(name, name)]


def check_tensors(
    found: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
    *,
    where: str,
    optional: frozenset[str] = frozenset(),
) -> None:
    """Check that a checkpoint's tensors match the model's in name and shape; raises UserError with the differences.

    `where` names the checkpoint in the message; `optional` tensors may be present and are ignored.
    """
    lines = [
        *(f"missing: {name} {_shape(wanted[name])}" for name in wanted if name not in found),
        *(f"unexpected: {name} {_shape(found[name])}" for name in found if name not in wanted and name not in optional),
        *(
            f"shape: {name} is {_shape(found[name])}, the model's is {_shape(wanted[name])}"
            for name in wanted
            if name in found and tuple(found[name]) != tuple(wanted[name])
        ),
    ]
    if lines:
        shown = [*lines[:20], *([f"and {len(lines) - 20} more"] if len(lines) > 20 else [])]
        raise UserError("\n  ".join([f"{where} does not match the model in its configuration:", *shown]))


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
