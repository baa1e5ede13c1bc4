"""Mapping readers between titan_exp parameters and another format's tensors, slice by slice."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, reduce

import torch
from torch import Tensor

from titan_exp.checkpoint.formats.safetensors import TensorReader, window_extent
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.models.convert.state_dict_map import RowRange, StateDictMap, TensorRows
from titan_exp.models.spec.lookup import model_spec

HELD_BYTES = 2**28
"""Bytes of a parameter, or of stacked experts, that are read at once, at least one row or expert; of larger ones, only
needed rows are read."""


class ImportReader:
    """Reads titan_exp parameters, by full name, from a checkpoint in another format."""

    def __init__(self, store: TensorReader, row_map: StateDictMap) -> None:
        self._store, self._map = store, row_map
        self.shapes = row_map.shapes
        self.dtype = cache(self._promoted)

    def read(self, name: str, *window: slice) -> Tensor:
        """Read a slice of a parameter, and only the needed source rows."""
        if (order := self._map.columns.get(name)) is not None:
            rows, columns = (*window, slice(None), slice(None))[:2]
            return self._read_in_their_order(name, rows)[:, list(order[columns])]
        return self._read_in_their_order(name, *window)

    def _read_in_their_order(self, name: str, *window: slice) -> Tensor:
        """Read a slice of a parameter whose columns have their order."""
        shape = self.shapes[name]
        start, size = window_extent(shape, window)
        gathered = torch.empty(size, dtype=self.dtype(name))
        stacked = name in self._map.stacked
        rows, columns = gathered.flatten(0, 1) if stacked else gathered, window[1 + stacked :]
        done = 0
        for first, count in self._map.blocks(name, start, size):
            self._gather(rows[done : done + count], name, first, columns)
            done += count
        return gathered

    def _gather(self, target: Tensor, name: str, first: int, columns: Sequence[slice]) -> None:
        """Fill consecutive rows of a parameter, from row `first` of the whole."""
        by_name: defaultdict[str, list[RowRange]] = defaultdict(list)
        for run in self._map.of(name, first, first + len(target)):
            by_name[run.name].append(run)
        for their_name, runs in by_name.items():
            low, high = min(run.first for run in runs), max(run.theirs.stop for run in runs)
            block = self._read(their_name, slice(low, high), *columns)
            for run in runs:
                theirs = slice(run.theirs.start - low, run.theirs.stop - low, run.step)
                target[run.start - first : run.start - first + run.rows] = block[theirs]

    def _read(self, name: str, *window: slice) -> Tensor:
        """Read a slice of one of their tensors, stored alone or with those of other experts."""
        stored, expert = self._map.stored(name)
        if name in self._map.reshaped:
            return self._store.read(name).reshape(self._map.their_shapes[name])[window]
        if expert is None:
            return self._store.read(name, *window)
        rows, *columns = window
        of_weights = len(self._map.their_shapes[name]) > 1
        columns = (columns or [slice(None)]) if of_weights else []
        return self._store.read(stored, slice(expert, expert + 1), *columns, rows)[0].t()

    def _promoted(self, name: str) -> torch.dtype:
        kinds = (self._store.dtype(self._map.stored(theirs)[0]) for theirs in self._map.their_names(name))
        return reduce(torch.promote_types, kinds)


class ExportReader:
    """Reads tensors of another format from a checkpoint of titan_exp parameters."""

    def __init__(self, store: TensorReader, row_map: StateDictMap) -> None:
        self._store, self._map = store, row_map
        # Experts of one parameter are read in sequence, and so are gate and up, whose rows a fused one scatters.
        self._held: tuple[str, range, Tensor] = ("", range(0), torch.empty(0))

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor."""
        return self._store.dtype(self._map.owner(name))

    def read(self, name: str, *window: slice) -> Tensor:
        """Read the window's rows of a tensor; of a tensor of all experts, only the experts in the window."""
        if (stored := self._map.reshaped.get(name)) is not None:
            return self._read(name, range(self._map.their_shapes[name][0])).reshape(stored)[window]
        template = self._map.stacks.get(name)
        if template is None:
            rows, *rest = window or (slice(None),)
            found = self._read(name, range(*rows.indices(self._map.their_shapes[name][0])))
            if (order := self._map.columns.get(self._map.owner(name))) is not None:
                found = found[:, torch.tensor(order).argsort()]
            return found[:, *rest] if rest else found
        experts, *rest = window or (slice(None),)
        shape, dtype = self._map.stored_shapes[name], self.dtype(name)
        chosen = range(*experts.indices(shape[0]))
        found = torch.empty((len(chosen), *shape[1:]), dtype=dtype)
        for place, expert in enumerate(chosen):
            each = template.format(expert)
            found[place] = self._read(each, range(self._map.their_shapes[each][0])).t()
        return found[:, *rest]

    def _read(self, name: str, rows: range) -> Tensor:
        """Read rows of one of their tensors."""
        tensor = torch.empty((len(rows), *self._map.their_shapes[name][1:]), dtype=self.dtype(name))
        for source in self._map.of_theirs(name):
            runs = [run for full in source.ranges if (run := full.within_theirs(rows.start, rows.stop)) is not None]
            if not runs:
                continue
            first, held = self._rows_of(source, runs)
            if len(runs) == 1 and runs[0].step == 1 and runs[0].rows == len(rows):
                return held[runs[0].start - first :][: len(rows)]
            for run in runs:
                target = slice(run.theirs.start - rows.start, run.theirs.stop - rows.start, run.step)
                tensor[target] = held[run.start - first : run.start - first + run.rows]
        return tensor

    def _rows_of(self, source: TensorRows, runs: Sequence[RowRange]) -> tuple[int, Tensor]:
        """Rows of a parameter that cover `runs`, preceded by the first one's index in the whole parameter."""
        span = slice(runs[0].start, runs[-1].ours.stop)
        if source.expert is None and (len(source.ranges) == 1 or self._bytes(source.ours) > HELD_BYTES):
            return span.start, self._store.read(source.ours, span)
        return self._read_once(source.ours, source.expert)

    def _read_once(self, ours: str, expert: int | None) -> tuple[int, Tensor]:
        """Rows of a parameter, including an expert's, preceded by the first one's index in the whole parameter."""
        owner, experts, held = self._held
        if owner != ours or (expert is not None and expert not in experts):
            self._held = ("", range(0), torch.empty(0))  # free before reading the next one
            experts, held = self._read_rows(ours, expert)
            self._held = (ours, experts, held)
        return (0 if expert is None else experts.start * self._map.shapes[ours][1]), held

    def _read_rows(self, ours: str, expert: int | None) -> tuple[range, Tensor]:
        if expert is None:
            return range(0), self._store.read(ours)
        shape = self._map.shapes[ours]
        count = max(1, HELD_BYTES * shape[0] // self._bytes(ours))
        first = expert - expert % count
        block = self._store.read(ours, slice(first, min(first + count, shape[0])))
        return range(first, first + len(block)), block.flatten(0, 1)

    def _bytes(self, ours: str) -> int:
        return torch.Size(self._map.shapes[ours]).numel() * self._store.dtype(ours).itemsize


def require_size(model: ModelConfig, shapes: Iterable[Sequence[int]], where: str) -> None:
    """Raise UserError if a model has many times as many elements as these tensors, before its rows are listed."""
    spec, held = model_spec(model), sum(math.prod(shape) for shape in shapes)
    if spec is not None and spec.parameters > 64 * held + 2**20:
        sizes = f"the model that is described has {spec.parameters:,} parameters, and its files hold {held:,}"
        raise UserError(f"{where}: {sizes}. A file is missing, or the description is damaged.")


def check_tensors(
    found: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
    *,
    where: str,
    optional: frozenset[str] = frozenset(),
) -> None:
    """Check that a checkpoint's tensors match the model's in name and shape; raises UserError with the differences.
    `where` names the checkpoint in the message; `optional` tensors may be present and are ignored."""
    lines = [
        *(f"missing: {name} {_shape(wanted[name])}" for name in wanted if name not in found),
        *(f"unexpected: {name} {_shape(found[name])}" for name in found if name not in wanted and name not in optional),
        *(
            f"shape: {name} is {_shape(found[name])}, and {_shape(wanted[name])} in the model"
            for name in wanted
            if name in found and tuple(found[name]) != tuple(wanted[name])
        ),
    ]
    if lines:
        shown = [*lines[:20], *([f"and {len(lines) - 20} more"] if len(lines) > 20 else [])]
        raise UserError("\n  ".join([f"{where} does not match the model in its configuration:", *shown]))


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
