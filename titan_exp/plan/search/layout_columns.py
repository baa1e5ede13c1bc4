"""Numbers of many layouts as columns of arrays, a row per layout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import accumulate
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from titan_exp.config.groups.parallelism import ParallelismConfig
from titan_exp.config.layout.pipeline_schedules import SCHEDULES
from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.extrapolate.layer_kinds import last_layers, repetition
from titan_exp.plan.search.layouts import MODES, Candidate
from titan_exp.plan.time.roofline import axis_ranks, message_seconds, schedule_and_bubble
from titan_exp.plan.trace.dispatch_mode import OpCosts

Column = npt.NDArray[np.float64]

_GROUP_OF = {
    "tp": ("tp",),
    "cp_across": ("tp", "cp"),
    "cp_within": ("tp", "cp"),
    "ep": ("tp", "cp", "ep", "etp"),
    "etp": ("etp",),
    "fsdp": ("tp", "cp", "dp_shard"),
    "efsdp": ("tp", "cp", "dp_shard", "ep", "etp"),
    "dp_replicate": ("tp", "cp", "dp_shard", "dp_replicate"),
    "pp": ("tp", "cp", "dp_shard", "dp_replicate", "pp"),
}
"""Degrees that place the first rank's group along an axis on nodes."""


@dataclass(frozen=True, eq=False)
class LayoutColumns:
    """Columns of layouts."""

    tp: Column
    cp: Column
    pp: Column
    ep: Column
    shards: Column
    """FSDP shards of parameters."""
    dense: Column
    """Parameters of a block's linears on a rank before they are sharded, without experts."""
    experts: Column
    """The same of experts."""
    ends: Column
    """The same of embedding and head together; of the embedding alone with a pipeline."""
    sequences: Column
    """Sequences of a micro-batch."""
    tokens: Column
    """Tokens of a micro-batch on a rank of cp."""
    loss_tokens: Column
    """Tokens whose logits are in memory at once."""
    micro_batches: Column
    passing: Column
    """Micro-batches of a pass through the pipeline; 0 without one."""
    stages: Column
    """Pipeline stages of all ranks."""
    gathers: Column
    """Gathers of a block's weights in a step: freed ones are gathered again for backward."""
    layers: Column
    """Like blocks of the first, second and last pipeline rank; shape (layouts, 3), as of the following. A period of
    blocks counts as one; first ones that differ from the rest are left out."""
    sends: Column
    """Hidden states and their gradients that these ranks send per micro-batch."""
    in_flight: Column
    """Blocks of these ranks with simultaneous activations."""
    kind: npt.NDArray[np.int64]
    """What changes costs in other ways than in proportion; shape (layouts, KINDS)."""
    groups: npt.NDArray[np.int64]
    """Group of equal ranks along every axis of `_GROUP_OF`; shape (layouts, axes)."""
    placed: Mapping[str, Sequence[ParallelismConfig]]
    """A layout of every group, by axis."""
    node: int
    """Devices of a node."""

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> "LayoutColumns":
        """Columns of layouts, in order."""
        loads, sizes, rows = dict[object, list[float]](), dict[object, tuple[float, float]](), list[list[float]]()
        for candidate in candidates:
            own, size = candidate.parallelism, candidate.experiment.training.micro_batch_size
            key = size, own.dp_replicate * own.dp_shard, own.cp, own.pp, own.pp_schedule
            if key not in loads:
                loads[key] = _load(candidate)
            degrees = own.tp, own.ep, own.etp
            if degrees not in sizes:
                sizes[degrees] = block_parameters(candidate)
            ends = candidate.shards, *sizes[degrees], _ends(candidate)
            rows.append([own.tp, own.cp, own.pp, own.ep, *ends, *loads[key]])
        groups, placed = list[npt.NDArray[np.int64]](), dict[str, list[ParallelismConfig]]()
        parallelisms = [each.parallelism for each in candidates]
        for axis, names in _GROUP_OF.items():
            # np.unique of rows ends in a TypeError if it is interrupted.
            degrees = [attrgetter(*names)(each) for each in parallelisms]
            members = dict(zip(degrees, parallelisms, strict=True))
            number_of = {own: number for number, own in enumerate(members)}
            placed[axis] = list(members.values())
            groups.append(np.array([number_of[own] for own in degrees]))
        table, kinds = np.array(rows, dtype=float), np.array([_kind(candidate) for candidate in candidates])
        columns, of_ranks = table[:, :-9].T, table[:, -9:].reshape(-1, 3, 3).transpose(1, 0, 2)
        values = [*columns, *of_ranks, kinds, np.stack(groups, axis=1), placed, candidates[0].layout.node_size]
        return cls(**{field.name: value for field, value in zip(fields(cls), values, strict=True)})

    def rows(self, numbers: npt.NDArray[np.int64]) -> "LayoutColumns":
        """Rows with these numbers."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: it[numbers] for name, it in arrays.items() if isinstance(it, np.ndarray)})

    def shape(self, number: int) -> tuple[float, ...]:
        """What a block's costs depend on, but the size of micro-batches and recomputation."""
        columns = self.tp, self.cp, self.ep, self.dense, self.experts, self.pp > 1, self.shards > 1
        return tuple(float(column[number]) for column in columns)

    def distances(self, number: int) -> Column:
        """How little the costs of a layout tell about the others': doublings of its degrees, and differences of kind.

        Costs that a layout lacks are not scaled from it: one that uses an axis tells more about one that does not.
        """
        far = np.zeros(len(self.tp))
        for column, weight in ((self.tp, 1.0), (self.cp, 1.0), (self.ep, 0.5), (self.sequences, 0.7)):
            far += weight * np.abs(np.log2(column / column[number]))
        for column in (self.tp, self.cp, self.ep):
            far += 3 * ((column > 1) & (column[number] == 1)) + ((column == 1) & (column[number] > 1))
        return far + (self.kind != self.kind[number]) @ KIND_WEIGHTS

    def message_seconds(self, axis: str, kind: str, size: Column, calls: Column | float, device: Device) -> Column:
        """Seconds of `calls` messages of `size` bytes together along an axis."""
        column = self.groups[:, list(_GROUP_OF).index(axis)]
        rates = np.zeros((len(self.placed[axis]), 2))
        for group in np.unique(column):
            costs = OpCosts()
            costs.messages[axis, kind] = 1
            ranks = axis_ranks(self.placed[axis][group], 0, costs)[axis]
            rates[group, 0] = message_seconds(kind, 2**40, ranks, device, self.node) / 2**40
            rates[group, 1] = message_seconds(kind, 0, ranks, device, self.node, calls=1)
        return size * rates[column, 0] + calls * rates[column, 1]


KIND_WEIGHTS = np.array([100.0, 10.0, 4.0, 1.0, 1.0, 2.0, 0.5])
"""Distances between layouts of different kinds, in the order of `_kind`."""


def _kind(candidate: Candidate) -> tuple[int, ...]:
    own = candidate.parallelism
    return (
        MODES.index(candidate.mode) if candidate.mode in MODES else len(MODES),
        own.pp > 1,
        candidate.shards == 1,
        # Gradients are not reduced.
        candidate.shards * own.dp_replicate == 1,
        candidate.experts is not None and candidate.experts[-1],
        own.etp > 1,
        0 if own.pp > 1 else min(candidate.layout.gradient_accumulation, 3),
    )


def _ends(candidate: Candidate) -> float:
    """Parameters of embedding and head on the first pipeline rank, before they are sharded."""
    spec, parallelism = candidate.spec, candidate.parallelism
    if spec is None:
        return 0.0
    return spec.vocab_size * spec.dim * (1 if spec.tied or parallelism.pp > 1 else 2) / parallelism.tp


def block_parameters(candidate: Candidate) -> tuple[float, float]:
    """Parameters of a block's linears on a rank before they are sharded: dense ones and those of experts."""
    spec, parallelism = candidate.spec, candidate.parallelism
    layers = () if spec is None else spec.layers[-repetition(candidate.experiment)[1] :]
    linears = [linear for layer in layers for linear in layer.linears]
    experts = sum(linear.parameters for linear in linears if linear.experts > 1)
    dense = sum(linear.parameters for linear in linears) - experts
    return dense / parallelism.tp, experts / (parallelism.ep * parallelism.etp)


@cache
def in_flight(schedule: str, ranks: int, rank: int, own: tuple[int, ...], micro_batches: int) -> int:
    """Most blocks of a rank after forward and before the end of backward. `own` are the layers of its stages."""
    if schedule == "1F1B":
        return own[0] * min(ranks - rank, micro_batches)
    if schedule == "Interleaved1F1B" and micro_batches % ranks == 0:
        # One micro-batch per rank through every stage but the last, and further ones until the first returns.
        turns = min((len(own) + 1) * ranks - 1 - 2 * rank, micro_batches * len(own))
        return sum(own[(turn // ranks) % len(own)] for turn in range(turns))
    if schedule not in SCHEDULES or not SCHEDULES[schedule].splits_backward:
        return sum(own) * micro_batches
    orders, _ = schedule_and_bubble(schedule, ranks, ranks * len(own), micro_batches)
    layers = dict(zip(sorted({action.stage for action in orders[rank]}), own, strict=True))
    changes = [layers[action.stage] * {"F": 1, "I": 0}.get(action.kind, -1) for action in orders[rank]]
    return max(accumulate(changes))


def _load(candidate: Candidate) -> list[float]:
    """Columns of a layout from `sequences` to `in_flight`."""
    layout, parallelism = candidate.layout, candidate.parallelism
    micro_batches, ranks, passing = layout.gradient_accumulation, parallelism.pp, 0
    # The first and last layers may differ from the rest.
    distinct, period = repetition(candidate.experiment)
    last = last_layers(candidate.experiment)
    layers = (layout.layers - distinct - last) // period
    by_rank, sends, held = [layers], [0], [layers]
    if ranks > 1:
        first, *middle, end = layout.layer_counts
        counts = [count // period for count in (first - distinct, *middle, end - last)]
        placed = list(zip(layout.stage_placement, counts, strict=True))
        by_rank, sends = [0] * ranks, [0] * ranks
        for stage, (rank, count) in enumerate(placed):
            by_rank[rank] += count
            sends[rank] += (stage > 0) + (stage < len(placed) - 1)
        own = [tuple(count for at, count in placed if at == rank) for rank in range(ranks)]
        passing = layout.pipeline_microbatches
        held = [in_flight(parallelism.pp_schedule, ranks, rank, own[rank], passing) for rank in range(ranks)]
    tokens = layout.micro_batch_size * candidate.experiment.training.seq_len / parallelism.cp
    chunk, gathers = min(tokens, layout.loss_chunk_tokens or tokens), 2 * micro_batches
    scalars = [layout.micro_batch_size, tokens, chunk, micro_batches, passing, layout.stage_count]
    of_ranks = [counts[at] for counts in (by_rank, sends, held) for at in (0, min(1, ranks - 1), -1)]
    return [*scalars, 1 if layout.reshard_policy == "never" else gathers, *of_ranks]
