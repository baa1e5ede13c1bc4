"""Estimated step time and memory of every layout of a search, scaled from the nearest traced one.

A rank's step is affine in its numbers of blocks and micro-batches. Work per token is divided by tp, bytes of weights
and messages follow their sizes. Messages on an axis that the traced layout does not use are left out, so that layouts
with it are tried early.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.search.layout_columns import Column, LayoutColumns
from titan_exp.plan.search.layout_cost import LayoutCost
from titan_exp.plan.search.layouts import Candidate
from titan_exp.plan.search.profile import Profile
from titan_exp.plan.time.roofline import compute_seconds, seconds_beside
from titan_exp.plan.trace.kernel_classes import EXPERT_MATMULS, MEASURES
from titan_exp.plan.trace.memory_tracker import CATEGORIES
from titan_exp.plan.trace.segments import CategoryBytes

OF_WEIGHTS = ("parameters", "gradients", "optimizer", "gathered parameters", "communication")
"""Categories of memory in proportion to a block's parameters."""
NEAR = 2.0
"""Distance up to which estimates are good enough to plan a layout: a doubled degree."""


class Estimates:
    """Estimates of layouts on a device, by `Candidate.number`."""

    def __init__(self, candidates: Sequence[Candidate], device: Device) -> None:
        self._device, self._columns = device, LayoutColumns.of(candidates)
        count = len(candidates)
        self.seconds: Column = np.zeros(count)
        """Step time."""
        self.bytes: Column = np.zeros(count)
        """Peak of allocated memory on the fullest rank."""
        self._far: Column = np.full(count, np.inf)
        self._profiles: list[Profile] = []
        self._of_weights: dict[tuple[str, bool], Column] = {}

    @property
    def least_seconds(self) -> Column:
        """Step time, if the estimate is too high."""
        return self.seconds * (1 - np.minimum(0.1, 0.03 + 0.02 * self._far))

    @property
    def least_bytes(self) -> Column:
        """Peak of memory, if the estimate is too high."""
        return self.bytes * (1 - np.minimum(0.15, 0.03 + 0.06 * self._far))

    def awaiting(self, numbers: Iterable[int]) -> npt.NDArray[np.bool_]:
        """Layouts to which one of these, which are being traced, is nearer than all traced ones, or equal."""
        nearer = np.zeros(len(self._far), dtype=bool)
        for number in numbers:
            far = self._columns.distances(number)
            nearer |= (far < self._far) | (far == 0)
        return nearer

    @property
    def near(self) -> npt.NDArray[np.bool_]:
        """True for layouts whose estimates are from one that tells enough to plan them."""
        return self._far <= NEAR

    def add(self, profile: Profile, cost: LayoutCost | None) -> None:
        """Use a sampled layout for those to which it is the nearest; `cost` is its planned one, if it is planned."""
        self._compare(profile)
        own, number = profile.candidate, profile.candidate.number
        far = self._columns.distances(number)
        nearer = np.flatnonzero(far <= self._far)
        self._far[nearer] = far[nearer]
        of_weights = self._of_weights.get((own.mode, own.parallelism.pp > 1), np.zeros(len(CATEGORIES) + 1))
        scaled = _Scaled(profile, self._columns.rows(np.append(nearer, number)), of_weights, self._device)
        seconds, held = scaled.seconds, scaled.bytes
        self.seconds[nearer] = seconds[:-1] * (1 if cost is None else cost.step_seconds / seconds[-1])
        constant = 2 * self._device.matmul_workspace
        left_out = 0 if cost is None else cost.peak_bytes - constant - held[-1]
        self.bytes[nearer] = np.maximum(0.5 * held[:-1], held[:-1] + left_out * np.clip(scaled.work[:-1], 0.5, 2.0))
        self.bytes[nearer] += constant

    def _compare(self, profile: Profile) -> None:
        """Separate bytes of tokens from bytes of weights, by a traced layout that differs in its micro-batch only."""
        own, columns = profile.candidate, self._columns
        for other in self._profiles:
            number, size = other.candidate.number, columns.sequences
            more = size[own.number] - size[number]
            same = columns.shape(own.number) == columns.shape(number)
            if more and same and own.mode == other.candidate.mode:
                one, two = (np.append(each.passing, each.token_bytes) for each in (profile, other))
                fixed = np.maximum(0.0, one - (one - two) / more * size[own.number])
                weights = columns.dense[own.number] + columns.experts[own.number]
                self._of_weights[own.mode, own.parallelism.pp > 1] = fixed / weights
        self._profiles.append(profile)


class _Scaled:
    """Terms of a profile, scaled to the layouts of some rows; the last row is the profile's own layout.

    `of_weights` are bytes per parameter that a block's temporaries, by category, and its elementwise operators have
    for any number of tokens.
    """

    def __init__(self, profile: Profile, rows: LayoutColumns, of_weights: Column, device: Device) -> None:
        self._profile, self._rows, self._device = profile, rows, device
        fixed = of_weights * (rows.dense[-1] + rows.experts[-1])
        self._passing = np.minimum(fixed[:-1], np.maximum(profile.passing, 0))
        self._moved = min(fixed[-1], float(profile.token_bytes))

    def _ratio(self, values: npt.NDArray[np.generic]) -> Column:
        return values / values[-1]

    @cached_property
    def work(self) -> Column:
        """Ratio of work per block and micro-batch."""
        return self._ratio(self._rows.tokens / self._rows.tp)

    @cached_property
    def _weights(self) -> Column:
        """Ratio of a block's parameters on a rank before they are sharded."""
        return self._ratio(self._rows.dense + self._rows.experts)

    @cached_property
    def seconds(self) -> Column:
        """Step time."""
        profile, rows, device = self._profile, self._rows, self._device
        block = compute_seconds(profile.block, device) * self.work + self._expert_weights
        moved = (profile.token_bytes - self._moved) * self.work + self._moved * self._weights
        block += moved / device.bandwidth
        block += profile.gathered_bytes * self._weights / device.copy_bandwidth
        block += profile.summed_bytes * self._weights / device.bandwidth * (rows.micro_batches > 1)
        ends = (compute_seconds(profile.ends, device) + profile.ends.bytes_moved / device.bandwidth) * self.work
        updated = profile.updated * self._shard / device.copy_bandwidth
        hidden = profile.message.messages.get(("pp", "send"), 0) * self.work
        handed_over = rows.message_seconds("pp", "send", hidden, 1, device)
        exposed, behind = self._exposed, self._behind
        totals = list[Column]()
        for rank, (layers, sends) in enumerate(zip(rows.layers.T, rows.sends.T, strict=True)):
            blocks, last = layers * rows.micro_batches, ((rank == 2) | (rows.pp == 1)) * rows.micro_batches
            compute = blocks * block + last * ends + layers * updated
            sent = sends * rows.micro_batches
            operators = blocks * profile.block.operators + last * profile.ends.operators + 2 * sent
            host = (operators + layers * profile.updated_operators) * device.launch_us / 1e6
            waiting = np.maximum(0.0, host - compute) if device.launches_ahead else host
            totals.append(np.maximum(compute + waiting + blocks * exposed + sent * handed_over, layers * behind))
        first, second, last = totals
        slowest = np.maximum.reduce(totals)
        others = np.maximum(0.0, first + last + (rows.pp - 2) * second - slowest)
        # The bubble of 1F1B, interleaved too.
        return slowest + (rows.pp > 1) * others * rows.pp / rows.stages / rows.micro_batches

    @cached_property
    def _expert_weights(self) -> Column:
        """Seconds by which reading the weights of a block's experts exceeds computing with them."""
        profile, rows, device = self._profile, self._rows, self._device
        flops, fp8, size, _ = (profile.block.kernels.get((EXPERT_MATMULS, measure), 0) for measure in MEASURES)
        if not size:
            return np.zeros_like(self.work)
        # Each pass reads or writes bf16 weights: forward, backward twice, and recomputation.
        passes = 3 if profile.candidate.mode == "none" else 4
        weights = min(size, passes * 2 * float(rows.experts[-1]))
        moved = weights * self._ratio(rows.experts) + (size - weights) * self.work
        computed = ((flops - fp8) / device.matmul_rate + fp8 / device.fp8_rate) * self.work
        return np.maximum(0.0, moved / device.bandwidth - computed)

    @cached_property
    def _shard(self) -> Column:
        """Bytes of a block's fp32 parameters on a rank."""
        return 4 * (self._rows.dense + self._rows.experts) / self._rows.shards

    @cached_property
    def _exposed(self) -> Column:
        """Seconds of messages that a block's passes wait for."""
        rows, found = self._rows, np.zeros_like(self.work)
        for (axis, kind), size in self._profile.block.messages.items():
            names, calls = set(axis.split("=")), self._profile.block.calls[axis, kind]
            if kind == "all-to-all" and "ep" in names:
                found += rows.message_seconds("ep", kind, size * self.work, calls, self._device)
            elif contextual := sorted(names & {"cp_across", "cp_within"}):
                if kind in ("all-gather", "reduce-scatter") and "fsdp" in names:
                    continue
                hops = (rows.cp - 1) / max(1, rows.cp[-1] - 1) if kind == "send" else np.ones_like(self.work)
                growth = rows.cp / rows.cp[-1] if kind in ("all-gather", "reduce-scatter") else hops
                found += rows.message_seconds(
                    contextual[0], kind, size * self.work * growth, calls * hops, self._device
                )
            elif names & {"tp", "etp"} and not names & {"fsdp", "efsdp"}:
                name = "tp" if "tp" in names else "etp"
                tokens = size * self._ratio(rows.tokens)
                beside = seconds_beside(self._profile.block, kind, self._device) * self.work
                found += np.maximum(0.0, rows.message_seconds(name, kind, tokens, calls, self._device) - beside)
        return found

    @cached_property
    def _behind(self) -> Column:
        """Seconds of a block's messages of weights and gradients in a step: bf16 gathers, fp32 reductions."""
        rows, found = self._rows, np.zeros_like(self.work)
        for axis, size in (("fsdp", rows.dense), ("efsdp", rows.experts)):
            if not size.any():
                continue
            gather = rows.message_seconds(axis, "all-gather", 2 * size, 1, self._device)
            found += rows.gathers * gather + rows.message_seconds(axis, "reduce-scatter", 4 * size, 1, self._device)
            shard = 4 * size / np.maximum(1, rows.shards)
            found += rows.message_seconds("dp_replicate", "all-reduce", shard, 1, self._device)
        return found

    @cached_property
    def bytes(self) -> Column:
        """Peak of allocated memory: in a block's backward pass, or in the loss on the last rank."""
        profile, rows = self._profile, self._rows
        several = (rows.micro_batches > 1) | (rows.pp > 1)
        # Gradients of several micro-batches are summed in fp32 before they are reduced.
        unreduced = profile.gradients * self._weights if several[-1] else 4 * (rows.dense + rows.experts)
        block = profile.state * self._shard + profile.gathered * self._weights + unreduced * several
        # One data rank has bf16 copies of its weights; without a pipeline, the ends are gathered all along.
        whole = rows.pp == 1
        copied = np.where(whole, rows.shards == 1, rows.shards[-1] == 1)
        block += 2 * (rows.dense + rows.experts) * copied
        first = profile.state * 4 * rows.ends / rows.shards + profile.first_gathered * self._weights
        first += rows.ends * (2 * (whole | copied) + 4 * whole)
        left, passing, ending = map(self._memory, (profile.left, profile.passing - self._passing, profile.ending))
        passing += float(self._passing.sum()) * self._weights
        peaks, sent = list[Column](), profile.message.messages.get(("pp", "send"), 0) * self.work
        per_rank = zip(rows.layers.T, rows.in_flight.T, rows.sends.T, strict=True)
        for rank, (layers, in_flight, sends) in enumerate(per_rank):
            temporary = np.where((rank == 2) | (rows.pp == 1), np.maximum(passing, ending), passing)
            # A single micro-batch has no gradients yet where it has all activations.
            held = np.maximum(in_flight * left + temporary, layers * self._shard * ~several + passing)
            # What is sent is held until a pass ends; when most is in flight, all but that has been sent.
            held += sends * sent * np.maximum(0.0, rows.passing - in_flight / np.maximum(1, layers))
            peaks.append(first * (rank == 0) + layers * block + held)
        return np.maximum.reduce(peaks)

    def _memory(self, size: CategoryBytes | Column) -> Column:
        """Bytes of a part of a micro-batch, each category in its proportion."""
        constant, loss = np.ones_like(self.work), self._ratio(self._rows.loss_tokens / self._rows.tp)
        of = dict.fromkeys(OF_WEIGHTS, self._weights) | {"loss": loss, "workspaces": constant}
        return sum((held * of.get(name, self.work) for name, held in zip(CATEGORIES, size, strict=True)), 0 * constant)
