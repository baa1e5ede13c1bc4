"""Lower bounds of a layout's step time and memory, scaled from traces of other layouts (branch and bound).

No term is divided by more than a degree: with twice the tensor or context parallelism, or half the micro-batch, an
operator moves at least half the bytes and keeps at least half of its outputs, and FLOPs are exactly halved. Tensor
parallelism sends whole activations at any degree, and no degree leaves out operators.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from titan_exp.config.layout.schedule_timeline import pipeline_seconds
from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.search.bound_terms import BoundTerms
from titan_exp.plan.search.layout_cost import extreme_ranks
from titan_exp.plan.search.layouts import Candidate
from titan_exp.plan.search.profile import Profile
from titan_exp.plan.search.rank_load import RankLoad, rank_load

BOUND_MARGIN = 0.985
"""Margin of scaled values: sizes are rounded up, and some copies become views."""


@dataclass(frozen=True)
class LowerBound:
    """Lower bound of a layout."""

    seconds: float
    """Step time."""
    bytes: float
    """Memory of the rank with the most layers, or of the first one."""


class LowerBounds:
    """Lower bounds of layouts on a device, tightened by every added profile."""

    def __init__(self, device: Device) -> None:
        self._device, self._terms = device, BoundTerms(device)
        self._profiles: list[Profile] = []
        self._loads: dict[tuple[object, ...], RankLoad] = {}
        self._by_shape: dict[tuple[object, ...], tuple[int, dict[str, float], defaultdict[str, float]]] = {}

    def add(self, profile: Profile) -> None:
        """Add a profile."""
        self._terms.compare(profile, self._profiles)
        self._profiles.append(profile)

    def of(self, candidate: Candidate) -> LowerBound:
        """Lower bound of a layout: the maximum of each term over all profiles."""
        load = self._load(candidate)
        units = self._units(candidate, load)
        return LowerBound(
            BOUND_MARGIN * self._seconds(candidate, load, units),
            BOUND_MARGIN * self._bytes(candidate, load, units) + 2 * self._device.matmul_workspace,
        )

    def _seconds(self, candidate: Candidate, load: RankLoad, units: Mapping[str, float]) -> float:
        device, ranks, totals = self._device, candidate.parallelism.pp, dict[int, float]()
        updated = units["updated"] / candidate.shards / device.copy_bandwidth
        behind, alone = self._behind(candidate, load, units), self._first_and_last(candidate)
        for rank in extreme_ranks(ranks):
            layers, ends = load.layers[rank], load.micro_batches * (rank == ranks - 1)
            blocks, sent = layers * load.micro_batches, load.sends[rank] * load.micro_batches
            compute = blocks * units["block"] + ends * units["ends"] + layers * updated
            # Every sent message has a received one.
            operators = blocks * units["operators"] + ends * units["end operators"] + 2 * sent
            operators += layers * units["updated operators"]
            exposed = blocks * units["sent"] + ends * units["ends sent"] + alone
            exposed += self._terms.message(candidate, "pp", "send", sent * units["handed over"], sent) if sent else 0.0
            busy = compute + device.launch_seconds(operators, compute) + exposed
            # The first and the last block are gathered once per micro-batch or never.
            totals[rank] = max(busy, max(0, layers - 2) * behind)
        return pipeline_seconds(totals, ranks, _bubble_lower_bound(candidate, load.micro_batches))

    def _behind(self, candidate: Candidate, load: RankLoad, units: Mapping[str, float]) -> float:
        """Seconds of a block's messages of weights and gradients."""
        seconds = self._terms.expert_messages(candidate, load.micro_batches)
        if candidate.parallelism.pp > 1:
            return seconds
        gathers, *reduces = (
            self._terms.message(candidate, "fsdp", kind, units[f"{kind} bytes"], units[f"{kind} calls"])
            for kind in ("all-gather", "reduce-scatter", "all-reduce")
        )
        return max(seconds, load.micro_batches * gathers + sum(reduces))

    def _first_and_last(self, candidate: Candidate) -> float:
        """Seconds of an empty first gather and last reduction, which nothing overlaps."""
        if candidate.shards == 1:
            return 0.0
        kinds = ("all-gather", "reduce-scatter")
        return sum(self._terms.message(candidate, "fsdp", kind, 0, 1) for kind in kinds)

    def _bytes(self, candidate: Candidate, load: RankLoad, units: Mapping[str, float]) -> float:
        several = load.micro_batches > 1 or candidate.parallelism.pp > 1
        weights, gradients = self._terms.expert_bytes(candidate) if several else (0.0, 0.0)
        kept, most = units["kept"] / candidate.shards, max(load.layers)
        weights = kept + max(units["gathered"], weights)
        gradients = max(units["gradients"], gradients)
        held = weights + gradients if load.refills else weights
        left = units["left"] + self._terms.copied_expert_bytes(candidate, surely=True)
        first = units["first"] + units["first kept"] / candidate.shards + load.layers[0] * held
        first += load.in_flight * left + units["passing"]
        # At the end of a block's backward pass, its weights are gathered and its gradients not yet reduced.
        within = most * kept + (load.in_flight - 1) * units["left"] + 4 * self._terms.gathered_experts(candidate)
        return max(most * (weights + gradients), first, within)

    def _load(self, candidate: Candidate) -> RankLoad:
        layout, parallelism = candidate.layout, candidate.parallelism
        size, schedule = layout.micro_batch_size, (parallelism.pp, parallelism.pp_schedule)
        key = size, layout.gradient_accumulation, parallelism.cp, schedule
        if key not in self._loads:
            self._loads[key] = rank_load(candidate)
        return self._loads[key]

    def _units(self, candidate: Candidate, load: RankLoad) -> Mapping[str, float]:
        """Sums of terms by unit, for all layouts that differ in the number of shards and stages."""
        parallelism = candidate.parallelism
        key = (
            candidate.mode,
            load.sequences,
            parallelism.tp,
            parallelism.cp,
            parallelism.pp > 1,
            candidate.experts,
            candidate.shards == 1,
            candidate.has_one_data_rank,
            min(load.micro_batches, 3),
        )
        seen, terms, units = self._by_shape.get(key, (0, {}, defaultdict(float)))
        if seen < len(self._profiles):
            for profile in self._profiles[seen:]:
                sampled = self._load(profile.candidate)
                for name, value in self._terms.terms(profile, candidate, load, sampled).items():
                    terms[name] = max(value, terms.get(name, 0.0))
            units = defaultdict[str, float](float)
            for name, value in terms.items():
                units[name.partition(":")[0]] += value
            self._by_shape[key] = len(self._profiles), terms, units
        return units


def _bubble_lower_bound(candidate: Candidate, micro_batches: int) -> float:
    """Lower bound of the bubble of any schedule with looped stage placement.

    The last rank waits for the first micro-batch to pass a stage of every other rank, and finishes before them.
    """
    ranks = candidate.parallelism.pp
    if ranks == 1:
        return 0.0
    waits = (ranks - 1) * ranks / candidate.layout.stage_count
    return waits / (micro_batches + waits)
