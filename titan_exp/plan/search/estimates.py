"""Estimated step time and memory of every layout of a search, scaled from the nearest traced one.

A rank's step is affine in its numbers of blocks and micro-batches. Work per token is divided by tp, bytes of weights
and messages follow their sizes. Messages on an axis that the traced layout does not use are left out, so that layouts
with it are tried early.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.search.layout_columns import LayoutColumns
from titan_exp.plan.search.layout_cost import LayoutCost
from titan_exp.plan.search.layouts import Candidate
from titan_exp.plan.search.profile import Profile
from titan_exp.plan.time.roofline import compute_seconds
from titan_exp.plan.trace.kernel_classes import EXPERT_MATMULS, MEASURES

Floats = npt.NDArray[np.float64]


class Estimates:
    """Estimates of layouts on a device, by `Candidate.number`."""

    def __init__(self, candidates: Sequence[Candidate], device: Device) -> None:
        self._device, self._columns = device, LayoutColumns.of(candidates)
        count = len(candidates)
        self.seconds: Floats = np.zeros(count)
        """Step time."""
        self.bytes: Floats = np.zeros(count)
        """Peak of allocated memory on the fullest rank."""
        self._far: Floats = np.full(count, np.inf)

    def add(self, profile: Profile, cost: LayoutCost) -> None:
        """Use a traced layout for those to which it is the nearest; `cost` is its exact one."""
        number = profile.candidate.number
        far = self._columns.distances(number)
        nearer = np.flatnonzero(far <= self._far)
        self._far[nearer] = far[nearer]
        scaled = _Scaled(profile, self._columns.rows(np.append(nearer, number)), self._device)
        seconds, held = scaled.seconds, scaled.bytes
        self.seconds[nearer] = seconds[:-1] * (cost.step_seconds / seconds[-1])
        # What the affine terms leave out is mostly per token: logits and their gradient.
        constant = 2 * self._device.matmul_workspace
        left_out = (cost.peak_bytes - constant - held[-1]) * scaled.work[:-1]
        self.bytes[nearer] = constant + np.maximum(held[:-1] + left_out, 0.5 * held[:-1])


class _Scaled:
    """Terms of a profile, scaled to the layouts of some rows; the last row is the profile's own layout."""

    def __init__(self, profile: Profile, rows: LayoutColumns, device: Device) -> None:
        self._profile, self._rows, self._device = profile, rows, device

    def _ratio(self, values: npt.NDArray[np.generic]) -> Floats:
        return values / values[-1]

    @cached_property
    def work(self) -> Floats:
        """Ratio of work per block and micro-batch."""
        return self._ratio(self._rows.tokens / self._rows.tp)

    @cached_property
    def _weights(self) -> Floats:
        """Ratio of a block's parameters on a rank before they are sharded."""
        return self._ratio(self._rows.dense + self._rows.experts)

    @cached_property
    def seconds(self) -> Floats:
        """Step time."""
        profile, rows, device = self._profile, self._rows, self._device
        block = compute_seconds(profile.block, device) * self.work + self._expert_weights
        block += profile.token_bytes * self.work / device.bandwidth
        block += profile.gathered_bytes * self._weights / device.copy_bandwidth
        block += profile.summed_bytes * self._weights / device.bandwidth * (rows.micro_batches > 1)
        ends = (compute_seconds(profile.ends, device) + profile.ends.bytes_moved / device.bandwidth) * self.work
        updated = profile.updated * self._shards / device.copy_bandwidth
        exposed, handed_over, behind = self._exposed, self._handed_over, self._behind
        totals = list[Floats]()
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
    def _expert_weights(self) -> Floats:
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
    def _shards(self) -> Floats:
        """Ratio of a block's persistent bytes, which ep does not change."""
        return self._ratio(1 / (self._rows.tp * self._rows.shards))

    @cached_property
    def _exposed(self) -> Floats:
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
                found += rows.message_seconds(name, kind, tokens, calls, self._device)
        return found

    @cached_property
    def _handed_over(self) -> Floats:
        """Seconds of a send between stages."""
        size = self._profile.message.messages.get(("pp", "send"), 0) * self.work
        return self._rows.message_seconds("pp", "send", size, 1, self._device)

    @cached_property
    def _behind(self) -> Floats:
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
    def bytes(self) -> Floats:
        """Peak of allocated memory, of the first rank or of the one with the most layers."""
        profile, rows = self._profile, self._rows
        kept, weights = profile.kept * self._shards, self._weights
        held = kept + (profile.gathered + profile.gradients * (rows.micro_batches > 1)) * weights
        left, first = profile.left * self.work, (profile.first_gathered + profile.first_kept) * self._shards
        passing = profile.passing * self.work
        own, most = rows.layers[:, 0], rows.layers.max(axis=1)
        other = np.where(rows.pp > 1, np.maximum(rows.in_flight - own, 0.0), rows.in_flight)
        return passing + np.maximum(first + own * held + rows.in_flight * left, most * held + other * left)
