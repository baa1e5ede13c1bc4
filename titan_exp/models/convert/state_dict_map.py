"""State-dict map: gives the rows of our parameters as row ranges of another tool's tensors, as plain data.

Streaming and sharded reading need no whole tensors: our rows are gathered from ranges of theirs.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.config.schema.component import component
from titan_exp.models.spec.feed_forward import FFN_GROUP
from titan_exp.models.spec.mixers import AttentionSpec


@dataclass(frozen=True)
class RowRange:
    """Range of `rows` consecutive rows of one of our parameters, from `start` on, that equal the rows of their tensor
    `name` from `first` on, with a stride of `step`."""

    start: int
    rows: int
    name: str
    first: int
    step: int = 1

    def within(self, start: int, stop: int) -> "RowRange | None":
        """Overlap with our rows `start` to `stop`; None if empty."""
        low, high = max(start, self.start), min(stop, self.start + self.rows)
        if low >= high:
            return None
        return RowRange(low, high - low, self.name, self.first + (low - self.start) * self.step, self.step)

    def within_theirs(self, start: int, stop: int) -> "RowRange | None":
        """Overlap with rows `start` to `stop` of theirs; None if empty."""
        low, high = (-(-(row - self.first) // self.step) for row in (start, stop))
        return self.within(self.start + low, self.start + high)

    @property
    def theirs(self) -> slice:
        """Rows of their tensor."""
        return slice(self.first, self.first + (self.rows - 1) * self.step + 1, self.step)

    @property
    def ours(self) -> slice:
        """Rows of our parameter."""
        return slice(self.start, self.start + self.rows)


@dataclass(frozen=True)
class TensorRows:
    """Rows of one of their tensors inside our parameter `ours`."""

    ours: str
    expert: int | None
    """Expert whose weight in our stacked parameter has the rows; None if the parameter is not stacked."""
    ranges: tuple[RowRange, ...]  # row ranges, numbered as in our whole parameter


@dataclass(frozen=True)
class StateDictMap:
    """Our parameters and persistent buffers as row ranges of their tensors. Rows of weights [experts, out, in] and
    biases [experts, out], stacked per expert, are numbered from 0 to experts · out. Rows of a vector are its
    elements."""

    runs: Mapping[str, tuple[RowRange, ...]]
    """Row ranges by our full name, in order, covering all rows; for a stacked parameter they cover one expert."""
    shapes: Mapping[str, tuple[int, ...]]  # shape by our full name
    their_shapes: Mapping[str, tuple[int, ...]]  # shape by their name, in the order of writing
    copies: Mapping[str, str]  # their tensors that duplicate another of their tensors (a tied head), mapped to it
    optional: frozenset[str] = frozenset()
    """Their tensors that may exist and are not read, such as the head of a tied model."""
    stacked: frozenset[str] = frozenset()
    """Our parameters stacked per expert, by full name; `{}` in the names of their ranges stands for the expert."""
    stacks: Mapping[str, str] = field(default_factory=dict)
    """Name of an expert's tensor, with `{}` for its number, by the name of their tensor of all experts: weights
    [experts, in, out], each expert's the transposed one of ours, or biases [experts, out]."""
    buffers: frozenset[str] = frozenset()  # our persistent buffers, by full name; in fp32 in every format
    columns: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Column order: their column for each of our columns, by our full name, for weights whose columns they order
    differently."""
    reshaped: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Stored shape by their name, for tensors that are stored with further dims of size 1."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names under which their tensors may be stored, by their name."""

    @cached_property
    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each stored tensor, by name in the order of writing; a tensor of all experts counts as one."""
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in self.their_shapes.items():
            stack, _ = self.stored(name)
            found[stack] = (
                self.reshaped.get(name, shape)
                if stack == name
                else (self.shapes[self.owner(stack)][0], *reversed(shape))
            )
        return found

    def stored(self, name: str) -> tuple[str, int | None]:
        """Stored tensor that holds one of their tensors, and the expert's index in it; a tensor stored alone gives
        itself and None."""
        return self._members.get(name, (name, None))

    def blocks(self, name: str, start: Sequence[int], size: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Runs of consecutive rows in a rectangular shard, in memory order: first row in the whole parameter, number of
        rows."""
        shape = self.shapes[name]
        if name not in self.stacked or size[1] == shape[1]:
            rows = shape[1] if name in self.stacked else 1
            yield start[0] * rows, size[0] * rows
            return
        for expert in range(start[0], start[0] + size[0]):
            yield expert * shape[1] + start[1], size[1]

    def of(self, name: str, start: int, stop: int) -> Iterator[RowRange]:
        """Row ranges of our rows `start` to `stop`."""
        if name not in self.stacked:
            yield from self._within(name, start, stop)
            return
        rows = self.shapes[name][1]
        for expert in range(start // rows, -(-stop // rows)):
            for run in self._within(name, start - expert * rows, stop - expert * rows):
                yield replace(run, start=run.start + expert * rows, name=run.name.format(expert))

    def owner(self, name: str) -> str:
        """Our parameter that holds one of their tensors, stored or not, or the tensor that it duplicates; the first if
        several hold its rows."""
        return self._owners[self.stacks.get(self.copies.get(name, name), self.copies.get(name, name)).format(0)][0][0]

    def copies_of(self, name: str) -> list[str]:
        """Their tensors that duplicate one of theirs."""
        return [copy for copy, original in self.copies.items() if original == name]

    def of_theirs(self, name: str) -> tuple[TensorRows, ...]:
        """Row ranges of one of their tensors, or of the tensor that it duplicates, in each of our parameters that hold
        its rows."""
        name = self.copies.get(name, name)
        found = []
        for ours, expert in self._owners[name]:
            rows = self.shapes[ours][0 if expert is None else 1]
            first = (expert or 0) * rows
            runs = tuple(run for run in self.of(ours, first, first + rows) if run.name == name)
            found.append(TensorRows(ours, expert, runs))
        return tuple(found)

    def their_names(self, name: str) -> list[str]:
        """Their tensors that one of our parameters is made of."""
        names = dict.fromkeys(run.name for run in self.runs[name])
        if name not in self.stacked:
            return [*names]
        return [template.format(expert) for expert in range(self.shapes[name][0]) for template in names]

    def is_buffer(self, name: str) -> bool:
        """True if one of their tensors is one of our buffers."""
        return self.owner(name) in self.buffers

    def _within(self, name: str, start: int, stop: int) -> Iterator[RowRange]:
        runs = self.runs[name]
        for run in runs[bisect_right(runs, start, key=lambda run: run.start + run.rows) :]:
            part = run.within(start, stop)
            if part is None:
                return
            yield part

    @cached_property
    def _members(self) -> dict[str, tuple[str, int]]:
        """Stored tensor and expert index by tensor name, for every expert's tensor that is stored in one of all
        experts."""
        return {
            template.format(expert): (stack, expert)
            for stack, template in self.stacks.items()
            for expert in range(self.shapes[self.owner(stack)][0])
        }

    @cached_property
    def _owners(self) -> dict[str, list[tuple[str, int | None]]]:
        """Our parameters that hold the rows of each of their tensors, with the expert in it, by their name."""
        found: dict[str, list[tuple[str, int | None]]] = {}
        for ours in self.runs:
            names = self.their_names(ours)
            per_expert = len(names) // self.shapes[ours][0] if ours in self.stacked else 0
            for place, name in enumerate(names):
                found.setdefault(name, []).append((ours, place // per_expert if per_expert else None))
        return found


def qkv_rows(attention: AttentionSpec, names: Sequence[str], *, interleaved: bool) -> Iterator[RowRange]:
    """Rows of the fused qkv weight, by key-value head: its query heads, its key, its value."""
    query, key, value = names
    width, group = attention.qk_dim, attention.group
    of_query = 2 * width if attention.gated else width
    start = 0
    for head in range(attention.kv_heads):
        rotated = [(query, head * group + member, of_query) for member in range(group)] + [(key, head, width)]
        for name, theirs, rows in rotated:
            if interleaved:
                assert rows == width, "no family has gates and rotates neighbours"
                yield from half_split_rows(start, width, name, theirs * width)
            else:
                yield RowRange(start, rows, name, theirs * rows)
            start += rows
        yield RowRange(start, attention.v_dim, value, head * attention.v_dim)
        start += attention.v_dim


def gate_up_rows(channels: int, gate: str, up: str, *, up_first: int = 0, step: int = 1) -> Iterator[RowRange]:
    """Rows of the fused gate and up weight, which alternate in groups (see `ops.swiglu`). Their up rows begin at
    `up_first`, and `step` is the stride of both."""
    for group in range(channels // FFN_GROUP):
        first, theirs = 2 * group * FFN_GROUP, group * FFN_GROUP * step
        yield RowRange(first, FFN_GROUP, gate, theirs, step)
        yield RowRange(first + FFN_GROUP, FFN_GROUP, up, up_first + theirs, step)


def rotated_tail_rows(heads: int, width: int, rotated: int, name: str) -> Iterator[RowRange]:
    """Rows of heads whose last `rotated` features they rotate as pairs (2i, 2i + 1)."""
    for start in range(0, heads * width, width):
        if width > rotated:
            yield RowRange(start, width - rotated, name, start)
        yield from half_split_rows(start + width - rotated, rotated, name, start + width - rotated)


def half_split_rows(start: int, width: int, name: str, first: int) -> Iterator[RowRange]:
    """Rows of our pairs (i, i + width / 2), taken from their neighbours (2i, 2i + 1)."""
    half = width // 2
    yield RowRange(start, half, name, first, step=2)
    yield RowRange(start + half, half, name, first + 1, step=2)


CheckpointFormat = Literal["huggingface", "llama", "torchtune", "diffusers", "bfl"]
"""Other tools' checkpoint formats: Hugging Face, Meta's `consolidated.*.pth`, torchtune, diffusers, Black Forest Labs'
`*.safetensors`."""


def checkpoint_formats(config: ModelConfig) -> Sequence[str]:
    """Checkpoint formats of other tools for this model; empty if its family has no state-dict map. A family without
    `STATE_DICTS` has Hugging Face's names if it defines `huggingface`."""
    family = component("model", config.architecture)
    has_config = hasattr(family, "huggingface")
    formats = getattr(family, "STATE_DICTS", ("huggingface",)) if hasattr(family, "state_dict_map") else ()
    return tuple(form for form in formats if has_config or form != "huggingface")


def state_dict_map(config: ModelConfig, form: CheckpointFormat) -> StateDictMap:
    """State-dict map from another tool's tensors to our parameters; the family must have the format."""
    return component("model", config.architecture).state_dict_map(config, form)
