"""Lower bounds of a layout's step time and memory, scaled from traces of other layouts (branch and bound).

No term is divided by more than a degree: with twice the tensor or context parallelism, or half the micro-batch, an
operator moves at least half the bytes and keeps at least half of its outputs, and FLOPs are exactly halved. Tensor
parallelism sends whole activations at any degree.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.search.layout_cost import SAFETY_FACTOR, copies_as_many_rows, has_more_experts, safety_factor
from titan_exp.plan.search.layouts import MODES, Candidate
from titan_exp.plan.search.profile import Profile
from titan_exp.plan.search.rank_load import RankLoad, rank_load
from titan_exp.plan.time.roofline import axis_ranks, compute_seconds, expert_weights_seconds, message_seconds
from titan_exp.plan.trace.dispatch_mode import OpCosts
from titan_exp.plan.trace.kernel_classes import EXPERT_MATMULS, MEASURES

CONTEXT_AXES = {"cp_across", "cp_within"}
"""Mesh axes of context parallelism."""
BOUND_MARGIN = 0.985
"""Margin of scaled values: sizes are rounded up, and some copies become views."""
WEIGHT_BYTES = 16
"""Upper bound of bytes that a micro-batch moves per weight of a block, for example to cast its gradient."""
WEIGHTS_MARGIN = 0.97
"""Margin of bytes scaled by the parameters of a block's linears, which leave out norms and replicated heads."""


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
        self._device = device
        self._profiles: list[Profile] = []
        self._replicated: dict[int, frozenset[str]] = {}
        self._rates: dict[tuple[object, ...], float] = {}
        self._loads: dict[tuple[object, ...], RankLoad] = {}
        self._affine: dict[int, tuple[float, float]] = {}
        """By number of a traced layout, bytes that a block moves per sequence and per weight."""
        self._sizes: dict[tuple[int, int, int], tuple[float, float]] = {}
        self._terms: dict[tuple[object, ...], tuple[int, dict[str, float], defaultdict[str, float]]] = {}

    def add(self, profile: Profile) -> None:
        """Add a profile."""
        own, load = profile.candidate, self._load(profile.candidate)
        shape = _shape(own)
        for other in self._profiles:
            if _shape(other.candidate) == shape and (more := load.sequences - self._load(other.candidate).sequences):
                per_sequence = (profile.token_bytes - other.token_bytes) / more
                of_weights = profile.token_bytes - per_sequence * load.sequences
                per_weight = max(0.0, of_weights) / max(1.0, sum(self._parameters(own)))
                self._affine[own.number] = max(0.0, per_sequence), per_weight
        self._profiles.append(profile)

    def of(self, candidate: Candidate) -> LowerBound:
        """Lower bound of a layout: the maximum of each term over all profiles."""
        load = self._load(candidate)
        units = self._units(candidate, load)
        block = load.micro_batches * units["block"]
        block += units["updated"] / candidate.shards / self._device.copy_bandwidth
        seconds = max(load.layers * block, load.last_layers * block + load.micro_batches * units["ends"])
        behind = self._expert_messages(candidate, load.micro_batches)
        if candidate.parallelism.pp == 1:
            gathers, reduces = (
                sum(units[f"{unit} {kind}"] * self._seconds_per_byte(candidate, "fsdp", kind) for kind in kinds)
                for unit, kinds in (("gathers", ("all-gather",)), ("reduces", ("reduce-scatter", "all-reduce")))
            )
            behind = max(behind, load.micro_batches * gathers + reduces)
        # The first and the last block are gathered once per micro-batch or never.
        seconds = max(seconds, max(0, load.layers - 2) * behind)
        seconds /= 1 - _bubble_lower_bound(candidate, load.micro_batches)
        several = load.micro_batches > 1 or candidate.parallelism.pp > 1
        weights, gradients = self._expert_bytes(candidate) if several else (0.0, 0.0)
        weights = units["kept"] / candidate.shards + max(units["gathered"], weights)
        gradients = max(units["gradients"], gradients)
        held = weights + gradients if load.refills else weights
        first = units["first"] + units["first kept"] / candidate.shards + load.first_layers * held
        first += load.in_flight * (units["left"] + self._copied_expert_bytes(candidate, surely=True)) + units["passing"]
        # At the end of a block's backward pass, its weights are gathered and its gradients not yet reduced.
        kept = load.layers * units["kept"] / candidate.shards
        within = kept + (load.in_flight - 1) * units["left"] + 4 * self._gathered_experts(candidate)
        return LowerBound(
            BOUND_MARGIN * seconds, BOUND_MARGIN * max(load.layers * (weights + gradients), first, within)
        )

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
        seen, terms, units = self._terms.get(key, (0, {}, defaultdict(float)))
        if seen < len(self._profiles):
            for profile in self._profiles[seen:]:
                for name, value in self._terms_from(profile, candidate, load).items():
                    terms[name] = max(value, terms.get(name, 0.0))
            units = defaultdict[str, float](float)
            for name, value in terms.items():
                units[name.partition(":")[0]] += value
            self._terms[key] = len(self._profiles), terms, units
        return units

    def _terms_from(self, profile: Profile, candidate: Candidate, load: RankLoad) -> dict[str, float]:
        """Terms from one profile, as `unit: kind`: seconds per micro-batch and block, bytes, and messages in bytes."""
        own, other = candidate.parallelism, profile.candidate.parallelism
        # Replicated weights are not divided by the degree.
        if own.tp < other.tp > candidate.kv_heads or not self._replicates(profile.candidate, candidate):
            return {}
        sampled, comparable_experts = self._load(profile.candidate), has_more_experts(profile.candidate, candidate)
        terms = _parameter_bytes(profile, candidate, load, comparable_experts)
        mode = profile.candidate.mode
        terms |= self._saved_bytes(profile, candidate, load, sampled)
        # Recomputation adds to the costs of a profile.
        if mode not in ("none", candidate.mode):
            return terms
        tokens = load.tokens / sampled.tokens
        # Layouts choose the saved operators of selective recomputation.
        alike = 1.0 if mode == "none" or candidate.experts == profile.candidate.experts else SAFETY_FACTOR
        terms["block: compute"] = compute_seconds(profile.block, self._device) * tokens * other.tp / own.tp * alike
        terms["ends: compute"] = compute_seconds(profile.ends, self._device) * tokens * other.tp / own.tp
        terms |= self._messages(candidate, profile, tokens)
        terms |= self._moved(candidate, profile, load, sampled)
        if not comparable_experts:
            return terms
        if own.pp == 1 and (candidate.shards > 1 or profile.candidate.shards == 1):
            terms |= _sharding_messages(profile, min(1.0, other.tp / own.tp))
        if (own.tp, own.cp, load.sequences) == (other.tp, other.cp, sampled.sequences):
            seconds = expert_weights_seconds(profile.block, self._device)
            terms["block: weights"] = max(seconds, terms.get("block: weights", 0.0))
        if other.cp > own.cp:
            return terms
        scale = other.cp / own.cp * (other.tp / own.tp if other.tp <= own.tp else 0.5)
        scale *= safety_factor(candidate, profile.candidate)
        # A pipeline gathers sharded weights before its first micro-batch, so `left` contains no weights.
        only_tokens = other.pp > 1 and profile.candidate.shards > 1
        comparable = mode == candidate.mode and (only_tokens or _same_lifetime(profile.candidate, candidate))
        if comparable and (only_tokens or load.sequences <= sampled.sequences):
            copied = self._copied_expert_bytes(profile.candidate)
            left = max(0.0, profile.left - copied) * scale * load.sequences / sampled.sequences
            terms["left"] = max(left, terms.get("left", 0.0))
        if factor := _sequence_factor(load.sequences, sampled.sequences):
            if comparable:
                terms["passing"] = profile.passing * scale * factor
            if _has_fewer_operators(profile.candidate, candidate):
                bandwidth = self._device.copy_bandwidth
                terms["ends: bytes"] = profile.ends.bytes_moved * scale * factor / bandwidth
        return terms

    def _moved(self, candidate: Candidate, profile: Profile, load: RankLoad, sampled: RankLoad) -> dict[str, float]:
        """Seconds of a block's operators that are bound by memory bandwidth, from one profile.

        Bytes of tokens, bytes of weights that do not depend on tokens, and operands of experts' matmuls.
        """
        own, other, terms = candidate.parallelism, profile.candidate.parallelism, dict[str, float]()
        bandwidth = self._device.bandwidth
        (dense, experts), (own_dense, own_experts) = self._parameters(profile.candidate), self._parameters(candidate)
        copied = self._copied_expert_bytes(profile.candidate)
        if not _has_fewer_operators(profile.candidate, candidate):
            return terms
        per_tp = other.tp / own.tp if other.tp <= own.tp else 0.5
        rows = copies_as_many_rows(profile.candidate, candidate)
        lifetime = _same_lifetime(profile.candidate, candidate) and _shards_experts(profile.candidate, candidate)
        if rows and other.cp <= own.cp:
            factor = _sequence_factor(load.sequences, sampled.sequences)
            moved = profile.token_bytes * factor * has_more_experts(profile.candidate, candidate)
            if not copied and factor:
                of_tokens = profile.token_bytes - WEIGHT_BYTES * (dense + experts)
                moved = max(moved, of_tokens * load.sequences / sampled.sequences)
            scale = other.cp / own.cp * per_tp * safety_factor(candidate, profile.candidate)
            moved *= scale
            if not copied and profile.candidate.number in self._affine:
                per_sequence, per_weight = self._affine[profile.candidate.number]
                if not lifetime:
                    per_weight = 0.0
                of_weights = per_weight * (own_dense + own_experts) * SAFETY_FACTOR * min(1.0, per_tp)
                moved = max(moved, WEIGHTS_MARGIN * scale * per_sequence * load.sequences + of_weights)
            terms["block: tokens"] = moved / bandwidth
        if lifetime:
            weights = WEIGHTS_MARGIN * min(1.0, per_tp if own.tp != other.tp else 1.0)
            weights *= (own_dense + own_experts) / (dense + experts) if experts else 1.0
            terms["block: gathered"] = profile.gathered_bytes * weights / self._device.copy_bandwidth
            if load.micro_batches > 1:
                summed = profile.summed_bytes * weights * (1 - 1 / load.micro_batches)
                terms["block: summed"] = summed / bandwidth
        flops, fp8, size, _ = (profile.block.kernels.get((EXPERT_MATMULS, measure), 0) for measure in MEASURES)
        if rows and size and not fp8 and other.tp <= own.tp:
            # Each pass reads or writes bf16 weights: forward, backward twice, and recomputation.
            passes = 3 if profile.candidate.mode == "none" else 4
            tokens = load.tokens / sampled.tokens * other.tp / own.tp
            least = 3 * 2 * own_experts + max(0.0, size - passes * 2 * experts) * tokens
            seconds = WEIGHTS_MARGIN * least / bandwidth - flops * tokens / self._device.matmul_rate
            terms["block: weights"] = max(0.0, seconds)
        return terms

    def _parameters(self, candidate: Candidate) -> tuple[float, float]:
        """Parameters of a block's linears on a rank before they are sharded: dense ones and those of experts."""
        key = candidate.parallelism.tp, candidate.parallelism.ep, candidate.parallelism.etp
        if key not in self._sizes:
            spec = candidate.spec
            layers = () if spec is None else spec.layers[-spec.period :]
            linears = [linear for layer in layers for linear in layer.linears]
            experts = sum(linear.parameters for linear in linears if linear.experts > 1)
            dense = sum(linear.parameters for linear in linears) - experts
            tp, ep, etp = key
            self._sizes[key] = dense / tp, experts / (ep * etp)
        return self._sizes[key]

    def _copied_expert_bytes(self, candidate: Candidate, *, surely: bool = False) -> float:
        """Bytes of the bf16 weights that every forward pass of experts on a single shard copies and saves.

        A pipeline copies them once. True for `surely` leaves out layouts that may not copy them.
        """
        if candidate.experts is None or candidate.experts[-1] or candidate.parallelism.pp > 1:
            return 0.0
        if surely and (candidate.shards == 1 or candidate.parallelism.dp_replicate > 1):
            return 0.0
        return 2 * self._parameters(candidate)[1] * (0.999 if surely else 1)

    def _expert_messages(self, candidate: Candidate, micro_batches: int) -> float:
        """Seconds of FSDP's messages of a block's experts: bf16 weights gathered, fp32 gradients reduced once."""
        if candidate.experts is None or not candidate.experts[-1]:
            return 0.0
        axis, size = "efsdp" if candidate.experts[2] else "fsdp", 0.999 * self._parameters(candidate)[1]
        # Freed weights are gathered again for backward.
        gathers = 1 if candidate.layout.reshard_policy == "never" else 2 * micro_batches
        seconds = 2 * gathers * self._seconds_per_byte(candidate, axis, "all-gather")
        return size * (seconds + 4 * self._seconds_per_byte(candidate, axis, "reduce-scatter"))

    def _gathered_experts(self, candidate: Candidate) -> float:
        """Lower bound of a layer's experts' parameters that a rank without a pipeline gathers at once."""
        if candidate.spec is None or candidate.experts is None or candidate.parallelism.pp > 1:
            return 0.0
        layers = candidate.spec.layers[-candidate.spec.period :]
        return 0.999 * self._parameters(candidate)[1] / max(1, sum(layer.router is not None for layer in layers))

    def _expert_bytes(self, candidate: Candidate) -> tuple[float, float]:
        """Bytes of a block's experts in several micro-batches: bf16 weights that a pipeline gathers, and gradients,
        which sharding sums in fp32."""
        if candidate.experts is None:
            return 0.0, 0.0
        size = 0.999 * self._parameters(candidate)[1]
        return 2 * size * (candidate.parallelism.pp > 1), (4 if candidate.experts[-1] else 2) * size

    def _saved_bytes(
        self, profile: Profile, candidate: Candidate, load: RankLoad, sampled: RankLoad
    ) -> dict[str, float]:
        """Bytes that a block's forward pass saves, from a profile of the same or more recomputation."""
        own, other, modes = (
            candidate.parallelism,
            profile.candidate.parallelism,
            (candidate.mode, profile.candidate.mode),
        )
        saves_less = modes[0] == modes[1] or (
            set(modes) <= set(MODES) and MODES.index(modes[0]) < MODES.index(modes[1])
        )
        if not saves_less or other.cp > own.cp or not copies_as_many_rows(profile.candidate, candidate):
            return {}
        scale = other.cp / own.cp * (other.tp / own.tp if other.tp <= own.tp else 0.5)
        scale *= safety_factor(candidate, profile.candidate)
        saved = max(0.0, profile.saved - self._copied_expert_bytes(profile.candidate))
        return {"left": saved * scale * load.sequences / sampled.sequences}

    def _replicates(self, sampled: Candidate, candidate: Candidate) -> bool:
        """True if a layout replicates every linear that a sampled one does."""
        for each in (sampled, candidate):
            if each.parallelism.tp not in self._replicated:
                self._replicated[each.parallelism.tp] = each.replicated
        return self._replicated[sampled.parallelism.tp] <= self._replicated[candidate.parallelism.tp]

    def _messages(self, candidate: Candidate, profile: Profile, tokens: float) -> dict[str, float]:
        """Seconds of messages of a block's activations from one profile."""
        own, other, terms = candidate.parallelism, profile.candidate.parallelism, dict[str, float]()
        smaller, same_tp = min(1.0, other.tp / own.tp), own.tp == other.tp
        for (axis, kind), size in profile.block.messages.items():
            factor, among, names = 0.0, axis, set(axis.split("="))
            if "ep" in names and kind == "all-to-all":
                # Ranks that share channels receive rows of each other's tokens.
                if own.ep > 1 and own.etp == other.etp and (same_tp or own.etp == 1) and not names & CONTEXT_AXES:
                    factor, among = tokens * other.tp / own.tp, "ep"
            elif "etp" in names:
                factor, among = tokens * (same_tp and own.etp == other.etp), "tp" if "tp" in names else axis
            elif axis == "tp" and own.tp > 1:
                # Ranks that share channels of experts exchange rows on this axis too. Where experts are sharded over
                # just these ranks, no message on them differs from FSDP's.
                of_fsdp = candidate.shards == 1 and candidate.experts is not None and own.ep * own.etp == 1
                factor = tokens * (not of_fsdp and (other.etp == 1 or own.etp > 1))
            elif names <= CONTEXT_AXES and 1 < other.cp <= own.cp:
                factor = tokens * smaller
                if axis == "cp_across":
                    # For two ranks, at least half of a ring's hops exist.
                    factor *= (own.cp // own.ulysses_degree) / (other.cp // other.ulysses_degree)
            if factor:
                terms[f"block: {among} {kind}"] = size * factor * self._seconds_per_byte(candidate, among, kind)
        return terms

    def _seconds_per_byte(self, candidate: Candidate, axis: str, kind: str) -> float:
        parallelism = candidate.parallelism
        expert_degrees = (parallelism.ep, parallelism.etp)
        degrees = (parallelism.dp_shard, *expert_degrees) if "fsdp" in axis else expert_degrees
        key = (axis, kind, parallelism.tp, parallelism.cp, degrees)
        if key not in self._rates:
            costs = OpCosts()
            costs.messages[axis, kind] = 1
            ranks = axis_ranks(parallelism, 0, costs)[axis]
            self._rates[key] = message_seconds(kind, 2**40, ranks, self._device, candidate.layout.node_size) / 2**40
        return self._rates[key]


def _parameter_bytes(
    profile: Profile, candidate: Candidate, load: RankLoad, comparable_experts: bool
) -> dict[str, float]:
    """Bytes of a block that are constant over micro-batches; kept ones of all shards."""
    smaller = min(1.0, profile.candidate.parallelism.tp / candidate.parallelism.tp) * 0.999
    shards = profile.candidate.shards
    if profile.candidate.experts is not None and not profile.candidate.experts[2]:
        # Whole experts are sharded, of which the first ranks have more than the mean.
        shards = min(shards, *(linear.experts for linear in profile.candidate.spec.expert_linears))
    terms = {"kept": profile.kept * smaller * shards}
    if _same_lifetime(profile.candidate, candidate):
        # Gradients of a single micro-batch may be in bf16, two of some twenty bytes per weight.
        terms["updated"] = 0.88 * profile.updated * smaller * shards
    if _same_lifetime(profile.candidate, candidate) and comparable_experts and load.micro_batches > 1:
        terms["gathered"] = profile.gathered * smaller
        terms["gradients"] = profile.gradients * smaller
        terms["first"] = profile.first_gathered * smaller
        terms["first kept"] = profile.first_kept * smaller * profile.candidate.shards
    return terms


def _shape(candidate: Candidate) -> tuple[object, ...]:
    """Everything that a block's costs depend on, but the micro-batch's size."""
    own = candidate.parallelism
    sharding = candidate.shards == 1, candidate.has_one_data_rank
    return own.tp, own.cp, candidate.experts, candidate.mode, own.pp > 1, *sharding


def _shards_experts(sampled: Candidate, candidate: Candidate) -> bool:
    """True if both layouts shard experts, or none does."""
    return (sampled.experts or (True,))[-1] == (candidate.experts or (True,))[-1]


def _sharding_messages(profile: Profile, smaller: float) -> dict[str, float]:
    """Bytes of FSDP's messages of a block. All-gathers on axes of context parallelism may be those of keys."""
    gathered = sum(
        size
        for (axis, kind), size in profile.block.messages.items()
        if kind == "all-gather" and "fsdp" in (names := set(axis.split("="))) and not names & CONTEXT_AXES
    )
    terms = {"gathers all-gather": gathered * smaller}
    for (axis, kind), size in profile.reduced.messages.items():
        if axis == "fsdp":
            terms[f"reduces {kind}"] = size * smaller
    return terms


def _same_lifetime(sampled: Candidate, candidate: Candidate) -> bool:
    """True if gathered weights have the same lifetime in two layouts; unsharded weights are never gathered, and one
    data rank reduces no gradients."""
    same_pipeline = (candidate.parallelism.pp > 1) == (sampled.parallelism.pp > 1)
    same_ranks = candidate.has_one_data_rank == sampled.has_one_data_rank
    return same_pipeline and same_ranks and (candidate.shards == 1) == (sampled.shards == 1)


def _sequence_factor(sequences: int, sampled: int) -> float:
    """Lower bound of the ratio of a micro-batch's bytes to a sampled one's.

    One sequence needs fewer copies than several, whose memory layouts differ.
    """
    if sequences == sampled:
        return 1.0
    if sequences == 1:
        return 0.0
    return 1.0 if sampled == 1 else min(1.0, sequences / sampled)


def _has_fewer_operators(sampled: Candidate, candidate: Candidate) -> bool:
    """True if a sampled layout runs no operator that the other lacks; pipelines gather and reduce least."""
    if sampled.parallelism.pp > 1:
        return True
    micro_batches = [min(layout.gradient_accumulation, 3) for layout in (sampled.layout, candidate.layout)]
    return candidate.parallelism.pp == 1 and micro_batches[0] >= micro_batches[1]


def _bubble_lower_bound(candidate: Candidate, micro_batches: int) -> float:
    """Lower bound of the bubble of any schedule with looped stage placement.

    The last rank waits for the first micro-batch to pass a stage of every other rank, and finishes before them.
    """
    ranks = candidate.parallelism.pp
    if ranks == 1:
        return 0.0
    waits = (ranks - 1) * ranks / candidate.layout.stage_count
    return waits / (micro_batches + waits)
